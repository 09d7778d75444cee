"""Recorded traces: every format gives back what was written; whatever is wrong is told with file, line and value."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ncclep_bench.errors import InputError
from ncclep_bench.routing import trace_formats
from ncclep_bench.routing.token_routing import TokenRouting, token_routing
from ncclep_bench.routing.trace_formats import MAX_ENTRIES
from tests.cases import make_case

Array = npt.NDArray[Any]
EXPERTS = np.array([[3, 1], [0, 2], [5, -1], [4, 0], [1, 5]])
WEIGHTS = np.array([[0.75, 0.25], [2.0, 2.0], [0.5, 0.0], [0.0, 1.0], [1.0, 3.0]])


def replayed(directory: Path, param: Any, **axes: Any) -> TokenRouting:
    defaults: dict[str, Any] = {"ranks": 1, "tokens": len(EXPERTS), "num_experts": 6, "placement": "uneven", "top_k": 2}
    case = make_case("dispatch", **{**defaults, "routing": "trace", "routing_param": param, **axes})
    return token_routing(case, directory=directory)


def refusal(directory: Path, param: Any, **axes: Any) -> str:
    with pytest.raises(InputError) as caught:
        replayed(directory, param, **axes)
    assert caught.value.exit_code == 2
    return str(caught.value)


def megatron(experts: Array, **fields: Any) -> str:
    record = {"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 3, "rank": 0}
    shape = {"num_tokens": len(experts), "topk": experts.shape[-1], "top_indices": experts.tolist()}
    return json.dumps(record | shape | fields) + "\n"


def npy_base64(array: Array) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def in_layer(experts: Array, layer: int, layers: int = 3) -> Array:
    """[tokens, layers, top_k] with `experts` as one layer and others elsewhere."""
    return np.stack([experts if index == layer else (experts[::-1] + 1) % 6 for index in range(layers)], axis=1)


def write_npz(path: Path, experts: Array) -> None:
    np.savez(path, prompt=in_layer(experts, 0), routed_experts=in_layer(experts, 1).astype(np.int16))


def csv_text(experts: Array, *, cells: Callable[[list[int]], str], header: str) -> str:
    return header + "\n" + "".join(f"{token},{cells(row)}\n" for token, row in enumerate(experts.tolist()))


FORMATS: dict[str, tuple[Callable[[Path, Array], object], str]] = {
    "trace.jsonl": (lambda path, experts: path.write_text(megatron(experts)), ""),
    "a.npy": (lambda path, experts: np.save(path, in_layer(experts, 0)), ""),
    "layer.npy": (lambda path, experts: np.save(path, in_layer(experts, 2).astype(np.int8)), "#layer=2"),
    "flat.npy": (lambda path, experts: np.save(path, experts), ""),
    "a.npz": (write_npz, "#layer=1"),
    "b.npz": (write_npz, "#array=prompt,layer=0"),
    "a.json": (lambda path, experts: path.write_text(json.dumps(in_layer(experts, 1).tolist(), indent=1)), "#layer=1"),
    "flat.json": (lambda path, experts: path.write_text(json.dumps(experts.tolist())), ""),
    "requests.jsonl": (
        lambda path, experts: path.write_text(
            json.dumps({"routed_experts": npy_base64(in_layer(experts[:2], 0))})
            + "\n"
            + json.dumps({"id": "r2", "routed_experts": in_layer(experts[2:], 0).tolist()})
        ),
        "",
    ),
    "plain.jsonl": (
        lambda path, experts: path.write_text("\n".join(json.dumps({"experts": row}) for row in experts.tolist())),
        "",
    ),
    "wide.csv": (
        lambda path, experts: path.write_text(
            csv_text(experts, header="token,expert_0,expert_1", cells=lambda row: ",".join(map(str, row)))
        ),
        "",
    ),
    "listed.csv": (
        lambda path, experts: path.write_text(
            csv_text(experts, header='"token","experts"', cells=lambda row: f'"{";".join(map(str, row))}"')
        ),
        "",
    ),
    "long.csv": (
        lambda path, experts: path.write_bytes(
            b"\xef\xbb\xbftoken, expert\r\n"
            + "".join(f"t{token},{expert}\r\n\r\n" for token, row in enumerate(experts) for expert in row).encode()
        ),
        "",
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_back_the_experts_that_were_written(tmp_path: Path, name: str) -> None:
    write, selector = FORMATS[name]
    # vLLM arrays have no masked choices; the others keep theirs.
    experts = np.where(EXPERTS < 0, 4, EXPERTS) if name[-3:] in ("npy", "npz") or "layer" in selector else EXPERTS
    write(tmp_path / name, experts)
    routing = replayed(tmp_path, name + selector)
    np.testing.assert_array_equal(routing.topk_idx, experts)
    assert ((routing.topk_weights > 0) == (experts >= 0)).all()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "w.csv",
            "token,expert_0,expert_1,weight_0,weight_1\n0,3,1,.75,.25\n1,0,2,2,2\n2,5,-1,0.5,0\n3,4,0,0,1\n4,1,5,1,3\n",
        ),
        ("l.csv", "token,experts,weights\n0,3 1,.75 .25\n1,0 2,2 2\n2,5 -1,0.5 0\n3,4 0,0 1\n4,1 5,1 3\n"),
        (
            "long.csv",
            "token,expert,weight\n0,3,.75\n0,1,.25\n1,0,2\n1,2,2\n2,5,.5\n2,-1,0\n3,4,0\n3,0,1\n4,1,1\n4,5,3\n",
        ),
        (
            "p.jsonl",
            "\n".join(
                json.dumps({"token": token, "experts": experts, "weights": weights})
                for token, (experts, weights) in enumerate(zip(EXPERTS.tolist(), WEIGHTS.tolist(), strict=True))
            ),
        ),
    ],
)
def test_recorded_weights_are_normalised_and_a_zero_still_counts_as_a_choice(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    routing = replayed(tmp_path, name)
    np.testing.assert_array_equal(routing.topk_idx, EXPERTS)
    expected = [[0.75, 0.25], [0.5, 0.5], [1, 0], [0, 1], [0.25, 0.75]]
    np.testing.assert_allclose(routing.topk_weights, expected, atol=1e-7)
    assert ((routing.topk_weights > 0) == (EXPERTS >= 0)).all()


@settings(max_examples=50, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(FORMATS)), tokens=st.integers(3, 40), top_k=st.integers(1, 5))
def test_random_traces_survive_every_format(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, name: str, tokens: int, top_k: int
) -> None:
    write, selector = FORMATS[name]
    if name == "wide.csv" and top_k != 2:
        top_k = 2
    seed = data.draw(st.integers(0, 1 << 32))
    experts = np.random.default_rng(seed).permuted(np.tile(np.arange(6), (tokens, 1)), axis=1)[:, :top_k]
    directory = tmp_path_factory.mktemp("trace")
    write(directory / name, experts)
    routing = replayed(directory, name + selector, tokens=tokens, top_k=top_k)
    np.testing.assert_array_equal(routing.topk_idx, experts)


def test_a_short_trace_starts_again_and_ranks_take_consecutive_tokens(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(megatron(EXPERTS))
    routing = replayed(tmp_path, "t.jsonl", ranks=3, tokens=4)
    np.testing.assert_array_equal(routing.topk_idx, np.concatenate([EXPERTS] * 3)[:12])
    np.testing.assert_array_equal(routing.of_rank(1)[0], EXPERTS[[4, 0, 1, 2]])


@pytest.mark.parametrize("param", ["", "/*rank*.jsonl", "/router_trace_rank*"])
def test_a_folder_or_glob_of_megatron_files_is_read_rank_by_rank(tmp_path: Path, param: str) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in range(11):
        experts = np.array([[rank % 6, (rank + 1) % 6]])
        (folder / f"router_trace_rank{rank}.jsonl").write_text(megatron(experts, rank=rank) if rank != 4 else "")
    routing = replayed(tmp_path, f"traces{param}", tokens=10)
    assert routing.topk_idx[:, 0].tolist() == [rank % 6 for rank in range(11) if rank != 4]


def test_selectors_pick_step_and_layer_and_the_first_record_settles_the_rest(tmp_path: Path) -> None:
    records = [
        (0, 3, {}),
        (0, 4, {}),
        (0, 4, {"block": "mtp", "mtp_idx": 0}),
        (1, 3, {}),
        (1, 4, {"block": "mtp", "mtp_idx": 0}),
        (1, 4, {}),
    ]
    (tmp_path / "t.jsonl").write_text(
        "".join(
            megatron(np.array([[number, (number + 1) % 6]]), step=step, layer=layer, hs_offset=0, **fields)
            for number, (step, layer, fields) in enumerate(records)
        )
    )
    for selector, record in {
        "": 0,
        "#layer=4": 1,
        "#layer=4,block=mtp": 2,
        "#step=1": 3,
        "#step=1,layer=4": 4,
        "#layer=4,step=1,block=decoder": 5,
    }.items():
        assert replayed(tmp_path, "t.jsonl" + selector, tokens=2).topk_idx[:, 0].tolist() == [record] * 2
    assert "recorded: step 0 to 1, layer 3 to 4" in refusal(tmp_path, "t.jsonl#layer=7")


def test_a_trace_that_is_rewritten_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for experts in (EXPERTS, EXPERTS[:, ::-1], np.concatenate([EXPERTS, EXPERTS])):
        path.write_text(megatron(experts) + "\n" * int(experts[0, 0]))
        np.testing.assert_array_equal(replayed(tmp_path, "t.jsonl", tokens=len(experts)).topk_idx, experts)


GOOD = '{"experts": [0, 1]}\n'
BAD: dict[str, tuple[str, list[str]]] = {
    "expert too large": (GOOD * 3 + '{"experts": [0, 6]}\n' + GOOD, ["line 4", "expert 6", "0 to 5"]),
    "expert below -1": (GOOD + '{"experts": [-2, 6]}', ["line 2", "expert -2", "0 to 5"]),
    "expert beyond 64 bits": (GOOD + '{"experts": [1, 100000000000000000000]}', ["line 2"]),
    "expert twice": (GOOD * 2 + '{"experts": [4, 4]}', ["line 3", "expert 4 twice"]),
    "other top-k": ('{"experts": [0, 1, 2]}\n' * 2, ["line 1", "3 experts", "top_k is 2"]),
    "ragged": (GOOD * 70_000 + '{"experts": [1]}\n', ["line 70001", "1 experts", "top_k is 2"]),
    "negative weight": ('{"experts": [0, 1], "weights": [0.5, -0.25]}', ["line 1", "weight -0.25", "finite"]),
    "NaN in JSON": ('{"experts": [0, 1], "weights": [0.5, NaN]}', ["line 1", "malformed"]),
    "infinite weight in JSON": ('{"experts": [0, 1], "weights": [0.5, 1e999]}', ["line 1"]),
    "weights for some": ('{"experts": [0, 1], "weights": [0.5, 0.5]}\n' + GOOD * 2, ["line 2", "weights for some"]),
    "weights of other length": ('{"experts": [0, 1], "weights": [1.0]}', ["line 1", "top_k is 2"]),
    "expert is text": (GOOD * 5 + '{"experts": ["a", 1]}', ["line 6", "int"]),
    "two records in a line": (GOOD + GOOD.strip() + "," + GOOD, ["line 2"]),
    "unknown field": ('{"experts": [0, 1], "layer": 3}', ["line 1", "layer"]),
    "unknown record": ('{"expert_ids": [0, 1]}', ["line 1", "expert_ids", "top_indices, routed_experts, experts"]),
    "cut off": (GOOD + '{"experts": [0,', ["line 2", "truncated"]),
    "NaN in CSV": ("token,experts,weights\n0,0 1,1 1\n1,0 1,1 nan\n", ["line 3", "weight nan", "finite"]),
    "infinity in CSV": ("token,expert_0,expert_1,weight_0,weight_1\n0,0,1,inf,1\n", ["line 2", "weight inf"]),
    "fraction in CSV": ("token,expert_0,expert_1\n0,0,1\n1,0,1.5\n", ["line 3", "expert 1.5"]),
    "NaN expert in CSV": ("token,expert_0,expert_1\n0,0,nan\n", ["line 2", "expert nan"]),
    "text in CSV": ("token,expert_0,expert_1\n0,0,1\n1,0,x\n", ["line 3", "x"]),
    "short row in CSV": ("token,expert_0,expert_1\n0,0,1\n1,0\n2,0,1\n", ["line 3"]),
    "long row in CSV": ("token,expert_0,expert_1\n0,0,1\n1,0,1,2\n", ["line 3"]),
    "empty row in CSV": ("token,expert_0,expert_1\n0,0,1\n1,,\n", ["line 3"]),
    "no experts in CSV": ("token,experts\n0,0 1\n1,\n", ["line 3", "no experts"]),
    "other top-k in CSV": ("token,expert_0\n0,0\n", ["1 experts", "top_k is 2"]),
    "ids and weights of other lengths": ("token,experts,weights\n0,0 1,1 1\n1,0 1 2,1\n", ["line 3"]),
    "token cut short in long CSV": ("token,expert\n0,0\n0,1\n1,0\n2,0\n2,1\n", ["line 4", "token 1", "1 experts"]),
    "token too long in long CSV": ("token,expert\n0,0\n0,1\n0,2\n0,3\n", ["line 2", "token 0", "4 experts"]),
    "header only": ("token,expert_0,expert_1\n", ["no tokens"]),
    "gap in header": ("token,expert_0,expert_2\n0,0,1\n", ["line 1", "token,expert_0,expert_2", "token,experts"]),
    "unknown column": ("token,layer,experts\n0,0,0 1\n", ["line 1", "layer"]),
    "empty": ("", ["empty"]),
    "blank": ("\n\n  \n", ["blank"]),
    "prose": ("Once upon a time\n", ["line 1", "Once upon a time"]),
    "ragged lists": ("[[[0, 1]], [[0]]]", ["different lengths"]),
    "lists of other top-k": ("[[[0, 1, 2]]]", ["3 experts", "top_k is 2"]),
    "list of numbers": ("[0, 1, 2]", ["line 1"]),
    "expert in lists": ("[[[0, 1]], [[1, 9]]]", ["token 1", "expert 9"]),
    "empty list": ("[]", []),
    "num_tokens differs": (megatron(EXPERTS, num_tokens=4), ["line 1", "num_tokens 4", "5"]),
    "topk differs": (megatron(EXPERTS, topk=8), ["line 1", "8 experts", "top_k is 2"]),
    "Megatron's rows differ": (megatron(EXPERTS[:2], top_indices=[[0, 1], [2]]), ["line 1", "1 experts"]),
    "Megatron's expert": (megatron(EXPERTS) + megatron(EXPERTS + 1), ["line 2, token 2", "expert 6"]),
    "Megatron's step is missing": ('{"top_indices": [[0, 1]]}', ["line 1", "step"]),
    "base64": ('{"routed_experts": "not base64!"}', ["line 1", "not a readable array"]),
    "base64 of text": ('{"routed_experts": "aGVsbG8="}', ["line 1", "not a readable array"]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_trace_is_refused_with_its_place_and_value(tmp_path: Path, name: str) -> None:
    text, parts = BAD[name]
    (tmp_path / "bad.trace").write_text(text)
    message = refusal(tmp_path, "bad.trace")
    assert str(tmp_path / "bad.trace") in message
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize(
    ("array", "parts"),
    [
        (np.zeros((4, 1, 2)), ["float64", "(4, 1, 2)"]),
        (np.array([[{}, {}]]), []),
        (np.zeros(4, dtype=int), ["(4,)"]),
        (np.zeros((0, 1, 2), dtype=int), ["no tokens"]),
        (np.zeros((4, 1, 3), dtype=int), ["3 experts"]),
        (np.array([[[0, 1]], [[2, 2]]]), ["token 1, layer 0", "expert 2 twice"]),
        (np.array([[[0, 1 << 40]]]), [str(1 << 40)]),
        (np.array([[[0, (1 << 64) - 1]]], dtype=np.uint64), [str((1 << 64) - 1)]),
    ],
)
@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_a_bad_array_is_refused(tmp_path: Path, array: Array, parts: list[str], suffix: str) -> None:
    path = tmp_path / f"bad.{suffix}"
    if suffix == "npy":
        np.save(path, array)
    else:
        np.savez(path, array)
    message = refusal(tmp_path, path.name)
    assert [part for part in [str(path), *parts] if part not in message] == [], message


def test_layers_and_arrays_that_are_not_there_are_told_from_those_that_are(tmp_path: Path) -> None:
    write_npz(tmp_path / "a.npz", EXPERTS % 6)
    assert "layer=0 to layer=2" in refusal(tmp_path, "a.npz#layer=3")
    assert "layer=0 to layer=2" in refusal(tmp_path, "a.npz#layer=-1")
    assert "prompt, routed_experts" in refusal(tmp_path, "a.npz#array=completion")
    assert "array, layer" in refusal(tmp_path, "a.npz#step=1")
    assert "key=value" in refusal(tmp_path, "a.npz#3")


@pytest.mark.parametrize(
    "content",
    [
        b"\x93NUMPY\x01\x00",
        b"\x93NUMPY\x01\x00\x08\x00{'desc}\n",
        b"\x93NUMPY\x01\x00\x0b\x00{'descr': '\n",
        b"PK\x03\x04 no",
        b"\0" * 9000,
    ],
)
def test_garbage_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "garbage").write_bytes(content)
    assert str(tmp_path / "garbage") in refusal(tmp_path, "garbage")


@settings(max_examples=200, deadline=None)
@given(
    start=st.sampled_from([b"", b"[", b"{", b"PK\x03\x04", b"\x93NUMPY", b"token,experts\n", b'{"experts": ']),
    tail=st.binary(max_size=80),
)
def test_random_bytes_never_end_in_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, start: bytes, tail: bytes
) -> None:
    directory = tmp_path_factory.mktemp("random")
    (directory / "random").write_bytes(start + tail)
    with contextlib.suppress(InputError):
        replayed(directory, "random")


@pytest.mark.parametrize(
    ("limit", "name", "part"),
    [
        ("_MAX_ARRAY_BYTES", "a.npz", "bytes unpacked"),
        ("_MAX_ARRAY_BYTES", "a.json", "bytes of JSON lists"),
        ("_MAX_LINE_BYTES", "trace.jsonl", "line 1: longer than 50 bytes"),
    ],
)
def test_what_would_fill_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, name: str, part: str
) -> None:
    monkeypatch.setattr(trace_formats, limit, 50)
    FORMATS[name][0](tmp_path / name, EXPERTS % 6)
    assert part in refusal(tmp_path, name)


def test_a_trace_of_too_many_tokens_is_refused_before_they_are_read(tmp_path: Path) -> None:
    huge = np.lib.format.open_memmap(tmp_path / "huge.npy", mode="w+", dtype=np.int8, shape=(1 << 28, 1, 2))
    del huge
    assert f"more than {MAX_ENTRIES} choices" in refusal(tmp_path, "huge.npy")


@pytest.mark.parametrize(
    "param", [None, 3.0, "", "#layer=1", "absent.jsonl", "absent*.jsonl", ".", "nul\0byte", "x" * 5000]
)
def test_a_file_that_is_not_there_is_named_with_what_is_expected(tmp_path: Path, param: Any) -> None:
    message = refusal(tmp_path, param)
    assert "routing_param" in message or "trace" in message


def test_a_device_or_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "no such file" in refusal(tmp_path, "pipe")
    assert "no such file" in refusal(tmp_path, "/dev/zero")
