"""Readers of recorded router traces, told apart by content: Megatron-Core, vLLM, plain CSV and JSON lines."""

from __future__ import annotations

import base64
import functools
import io
import itertools
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ncclep_bench.errors import InputError

MAX_ENTRIES = 1 << 28
"""Choices (tokens × top_k) that one trace may hold."""
_MAX_LINE_BYTES = 256 << 20
_MAX_ARRAY_BYTES = 4 << 30
"""Bytes of a file of nested JSON lists, or of an unpacked .npz member."""
_BATCH_TOKENS = 1 << 16


class Rows(NamedTuple):
    """Consecutive tokens: experts [tokens, top_k] as read, raw weights or None, and where token i stands."""

    path: Path
    experts: _Experts
    weights: _Weights
    place: Callable[[int], str]


class Wanted(NamedTuple):
    """What to take from a trace: `selector` is what follows # in routing_param."""

    selector: Mapping[str, str]
    top_k: int


_Parsed = TypeVar("_Parsed")
_Experts = npt.NDArray[Any]
_Weights = npt.NDArray[np.float64] | None
Reader = Callable[[list[Path], Wanted], Iterable[Rows]]


class _Format(NamedTuple):
    reader: Reader
    selectors: tuple[str, ...]


def bad_trace(path: Path, place: str, problem: str, hint: str | None = None) -> NoReturn:
    """Raises InputError naming file and place."""
    raise InputError(f"trace {path}, {place}: {problem}" if place else f"trace {path}: {problem}", hint=hint)


def reader_of(path: Path, wanted: Wanted) -> Reader:
    """The reader for a file, by how it begins; raises InputError for a selector that its format lacks."""
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start:
        bad_trace(path, "", "the file is blank")
    trace_format = _record_format(path) if start.startswith(b"{") else _file_format(start)
    for key in wanted.selector:
        if key not in trace_format.selectors:
            known = ", ".join(trace_format.selectors) or "none in this format"
            bad_trace(path, "", f"cannot select by {key!r}", f"allowed after # in routing_param: {known}")
    return trace_format.reader


def _file_format(start: bytes) -> _Format:
    return next(trace_format for prefix, trace_format in _FILES.items() if start.startswith(prefix))


def _record_format(path: Path) -> _Format:
    line, text = next(_lines(path))
    fields = _decoded(path, line, text, msgspec.json.Decoder(dict[str, msgspec.Raw]))
    for field, trace_format in _RECORDS.items():
        if field in fields:
            return trace_format
    known = ", ".join(_RECORDS)
    bad_trace(path, f"line {line}", f"a record of {', '.join(fields)[:80]!r}", f"allowed: records with one of {known}")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each line that is not blank."""
    with path.open("rb") as file:
        for number in itertools.count(1):
            line = file.readline(_MAX_LINE_BYTES + 1)
            if not line:
                return
            if len(line) > _MAX_LINE_BYTES:
                bad_trace(path, f"line {number}", f"longer than {_MAX_LINE_BYTES} bytes", "write one record per line")
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.isspace():
                yield number, line


def _decoded(path: Path, line: int, text: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[Any]) -> Any:
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        bad_trace(path, f"line {line}", str(error), "allowed: a record per line, no NaN or infinity")


def _refuse_top_k(path: Path, place: str, found: int, wanted: Wanted) -> NoReturn:
    hint = "allowed: the same number everywhere, with −1 for a masked choice"
    bad_trace(path, place, f"{found} experts for a token, top_k is {wanted.top_k}", hint)


def _table(rows: list[Any], top_k: int, dtype: type[np.int64] | type[np.float64]) -> npt.NDArray[Any]:
    """Lists of top_k numbers as an array; raises ValueError for other lengths and for integers beyond 64 bits."""
    for row in rows:
        if len(row) != top_k:
            raise ValueError(f"{len(row)} experts for a token, top_k is {top_k}")
    try:
        return np.fromiter(itertools.chain.from_iterable(rows), dtype, len(rows) * top_k).reshape(len(rows), top_k)
    except OverflowError as error:
        raise ValueError("a number beyond 64 bits") from error


def _parsed(path: Path, lines: list[tuple[int, bytes]], parse: Callable[[list[bytes]], _Parsed]) -> _Parsed:
    """`parse` of many lines at once; what it refuses is sought by halves and told of the line where it stands."""
    try:
        return parse([text for _, text in lines])
    except (ValueError, msgspec.DecodeError) as error:
        middle = len(lines) // 2
        if middle:
            _parsed(path, lines[:middle], parse)
            _parsed(path, lines[middle:], parse)
        bad_trace(path, f"line {lines[middle][0]}", str(error), "allowed: the experts of a token, −1 where masked")


def _place_by_line(lines: list[tuple[int, bytes]], lines_per_token: int) -> Callable[[int], str]:
    return lambda index: f"line {lines[index * lines_per_token][0]}"


def _batches(
    path: Path, lines: Iterator[tuple[int, bytes]], parse: Callable[[list[bytes]], tuple[_Experts, _Weights]]
) -> Iterator[Rows]:
    """Tokens that stand one in a line, many at a time."""
    while batch := list(itertools.islice(lines, _BATCH_TOKENS)):
        yield Rows(path, *_parsed(path, batch, parse), _place_by_line(batch, 1))


# Megatron-Core, router_trace.py: one file router_trace_rankN.jsonl per rank, a record per step, block and layer.


class _MegatronRecord(msgspec.Struct):
    step: int
    layer: int
    top_indices: msgspec.Raw
    rank: int = 0
    stage: str = ""
    block: str = ""
    mtp_idx: int | None = None
    num_tokens: int | None = None
    topk: int | None = None


_MEGATRON_LAYER = ("step", "stage", "block", "layer", "mtp_idx")


def _megatron(paths: list[Path], wanted: Wanted) -> Iterable[Rows]:
    """One layer of one step, rank by rank; what `wanted` leaves open is that of the first record that fits."""
    records = msgspec.json.Decoder(_MegatronRecord)
    indices = msgspec.json.Decoder(list[list[int]])
    selector = wanted.selector
    of_rank: list[tuple[int, Rows]] = []
    steps: set[int] = set()
    layers: set[int] = set()
    for path in paths:
        for line, text in _lines(path):
            record = _decoded(path, line, text, records)
            steps.add(record.step)
            layers.add(record.layer)
            if any(str(getattr(record, key)) != value for key, value in selector.items()):
                continue
            if not of_rank:
                selector = {key: str(getattr(record, key)) for key in _MEGATRON_LAYER} | dict(wanted.selector)
            if record.topk not in (None, wanted.top_k):
                _refuse_top_k(path, f"line {line}", record.topk, wanted)
            tokens = _decoded(path, line, record.top_indices, indices)
            if record.num_tokens not in (None, len(tokens)):
                bad_trace(path, f"line {line}", f"num_tokens {record.num_tokens}, but top_indices of {len(tokens)}")
            try:
                experts = _table(tokens, wanted.top_k, np.int64)
            except ValueError as error:
                bad_trace(path, f"line {line}", f"top_indices: {error}", "allowed: num_tokens lists of topk experts")
            rows = Rows(path, experts, None, functools.partial("line {}, token {}".format, line))
            of_rank.append((record.rank, rows))
    if not of_rank:
        allowed = f"step {min(steps)} to {max(steps)}, layer {min(layers)} to {max(layers)}"
        bad_trace(paths[0], "", f"no record has {', '.join(map('='.join, selector.items()))}", f"recorded: {allowed}")
    return [rows for _, rows in sorted(of_rank, key=lambda entry: entry[0])]


# vLLM, enable_return_routed_experts: outputs[i].routed_experts is an array [tokens, layers, top_k].


def _layer(path: Path, place: str, array: npt.NDArray[Any], wanted: Wanted) -> Rows:
    """One layer of an array [tokens, layers, top_k], or all of [tokens, top_k]."""
    if array.dtype.kind not in "iu" or array.ndim not in (2, 3):
        found = f"array of {array.dtype}, shape {array.shape}"
        bad_trace(path, place, found, "allowed: integers [tokens, layers, top_k]")
    layers = array.shape[1] if array.ndim == 3 else 1
    layer = wanted.selector.get("layer", "0")
    if not layer.isdecimal() or int(layer) >= layers:
        bad_trace(path, place, f"no layer {layer}", f"allowed: layer=0 to layer={layers - 1}")
    if array.shape[-1] != wanted.top_k:
        _refuse_top_k(path, place, array.shape[-1], wanted)
    chosen = array[:, int(layer)] if array.ndim == 3 else array
    return Rows(path, chosen, None, lambda index: f"{place}{', ' if place else ''}token {index}, layer {layer}")


def _array(path: Path, place: str, load: Callable[[], Any]) -> npt.NDArray[Any]:
    try:
        return np.asarray(load())
    except Exception as error:  # numpy lets through whatever its header parser, zip and zlib raise at garbage.
        bad_trace(path, place, f"not a readable array: {error}", "allowed: integers [tokens, layers, top_k]")


def _npy(paths: list[Path], wanted: Wanted) -> Iterator[Rows]:
    for path in paths:
        array = _array(path, "", functools.partial(np.load, path, mmap_mode="r", allow_pickle=False))
        yield _layer(path, "", array, wanted)


def _npz(paths: list[Path], wanted: Wanted) -> Iterator[Rows]:
    for path in paths:
        try:
            with zipfile.ZipFile(path) as archive:
                sizes = {member.filename.removesuffix(".npy"): member.file_size for member in archive.infolist()}
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            bad_trace(path, "", f"not a readable .npz file: {error}")
        name = wanted.selector.get("array", next(iter(sizes)) if len(sizes) == 1 else "routed_experts")
        if name not in sizes:
            bad_trace(path, "", f"no array {name!r}", f"allowed: #array= one of {', '.join(sizes)}")
        if sizes[name] > _MAX_ARRAY_BYTES:
            bad_trace(path, f"array {name}", f"{sizes[name]} bytes unpacked", "store it as .npy")
        array = _array(path, f"array {name}", functools.partial(_member, path, name))
        yield _layer(path, f"array {name}", array, wanted)


def _member(path: Path, name: str) -> Any:
    with np.load(path, allow_pickle=False) as arrays:
        return arrays[name]


_NestedLists = list[list[int | list[int]]]


def _nested(path: Path, place: str, lists: _NestedLists, wanted: Wanted) -> Rows:
    try:
        array = np.array(lists)
    except ValueError:
        bad_trace(path, place, "rows of different lengths", "allowed: lists [tokens][layers][top_k] of equal lengths")
    return _layer(path, place, array, wanted)


def _json_lists(paths: list[Path], wanted: Wanted) -> Iterator[Rows]:
    decoder = msgspec.json.Decoder(_NestedLists)
    for path in paths:
        if path.stat().st_size > _MAX_ARRAY_BYTES:
            bad_trace(path, "", f"more than {_MAX_ARRAY_BYTES} bytes of JSON lists", "store the array as .npy")
        yield _nested(path, "", _decoded(path, 1, path.read_bytes().removeprefix(b"\xef\xbb\xbf"), decoder), wanted)


class _VllmRecord(msgspec.Struct):
    routed_experts: str | _NestedLists


def _vllm_lines(paths: list[Path], wanted: Wanted) -> Iterator[Rows]:
    """One request per line; the server sends the array as base64 of a .npy file."""
    decoder = msgspec.json.Decoder(_VllmRecord)
    for path in paths:
        for line, text in _lines(path):
            routed = _decoded(path, line, text, decoder).routed_experts
            if isinstance(routed, list):
                yield _nested(path, f"line {line}", routed, wanted)
                continue
            yield _layer(
                path, f"line {line}", _array(path, f"line {line}", functools.partial(_unpacked, routed)), wanted
            )


def _unpacked(text: str) -> Any:
    return np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)


# Plain tables of people's own.


class _PlainRecord(msgspec.Struct, forbid_unknown_fields=True):
    experts: list[int]
    token: int | str | None = None
    weights: list[float] | None = None


def _plain_lines(paths: list[Path], wanted: Wanted) -> Iterator[Rows]:
    one = msgspec.json.Decoder(_PlainRecord)
    many = msgspec.json.Decoder(list[_PlainRecord])

    def parse(lines: list[bytes]) -> tuple[_Experts, _Weights]:
        # One alone, so that the error speaks of the line as it stands.
        records = [one.decode(lines[0])] if len(lines) == 1 else many.decode(b"[" + b",".join(lines) + b"]")
        if len(records) != len(lines):
            raise ValueError("more than one record in a line")
        experts = _table([record.experts for record in records], wanted.top_k, np.int64)
        given = [record.weights for record in records if record.weights is not None]
        if given and len(given) < len(records):
            raise ValueError("weights for some tokens only")
        return experts, _table(given, wanted.top_k, np.float64) if given else None

    for path in paths:
        yield from _batches(path, _lines(path), parse)


def _csv(paths: list[Path], wanted: Wanted) -> Iterator[Rows]:
    for path in paths:
        lines = _lines(path)
        line, header = next(lines, (1, b""))
        names = [name.strip() for name in header.decode(errors="replace").replace('"', "").split(",")]
        count = sum(name.startswith("expert_") for name in names)
        wide = ["token", *(f"expert_{choice}" for choice in range(count))]
        if count and names in (wide, wide + [f"weight_{choice}" for choice in range(count)]):
            yield from _wide(path, lines, count, len(names) > len(wide), wanted)
        elif names in (["token", "experts"], ["token", "experts", "weights"]):
            yield from _listed(path, lines, len(names), wanted)
        elif names in (["token", "expert"], ["token", "expert", "weight"]):
            yield from _long(path, lines, len(names), wanted)
        else:
            allowed = "token,expert_0,…[,weight_0,…] or token,experts[,weights] or token,expert[,weight]"
            bad_trace(path, f"line {line}", f"{','.join(names)[:80]!r} is no trace", f"allowed as CSV: {allowed}")


def _wide(
    path: Path, lines: Iterator[tuple[int, bytes]], count: int, with_weights: bool, wanted: Wanted
) -> Iterator[Rows]:
    """token,expert_0,…[,weight_0,…]"""
    if count != wanted.top_k:
        _refuse_top_k(path, "header", count, wanted)

    def parse(lines: list[bytes]) -> tuple[_Experts, _Weights]:
        numbers = _numbers(_split(lines)[1], count * (1 + with_weights), ",")
        return numbers[:, :count], numbers[:, count:] if with_weights else None

    return _batches(path, lines, parse)


def _listed(path: Path, lines: Iterator[tuple[int, bytes]], columns: int, wanted: Wanted) -> Iterator[Rows]:
    """token,experts[,weights]"""

    def parse(lines: list[bytes]) -> tuple[_Experts, _Weights]:
        cells = [text.replace(";", " ").split(",") for text in _split(lines)[1]]
        if any(len(row) != columns - 1 for row in cells):
            raise ValueError(f"not {columns} columns as in the header")
        experts, *weights = (
            _numbers([row[column] for row in cells], wanted.top_k, None) for column in range(columns - 1)
        )
        return experts, weights[0] if weights else None

    return _batches(path, lines, parse)


def _long(path: Path, lines: Iterator[tuple[int, bytes]], columns: int, wanted: Wanted) -> Iterator[Rows]:
    """token,expert[,weight], the rows of a token together; its name ends where another begins."""

    def parse(lines: list[bytes]) -> tuple[list[str], npt.NDArray[np.float64]]:
        names, cells = _split(lines)
        return names, _numbers(cells, columns - 1, ",")

    top_k = wanted.top_k
    before = None
    while batch := list(itertools.islice(lines, _BATCH_TOKENS // top_k * top_k or top_k)):
        names, numbers = _parsed(path, batch, parse)
        token = np.array(names)
        starts = np.concatenate(([0], np.flatnonzero(token[1:] != token[:-1]) + 1))
        sizes = np.diff(starts, append=len(token))
        for start in starts[sizes != top_k][:1]:
            _refuse_top_k(path, f"line {batch[start][0]}, token {names[start]}", names.count(names[start]), wanted)
        if names[0] == before:
            _refuse_top_k(path, f"line {batch[0][0]}, token {before}", top_k + 1, wanted)
        before = names[-1]
        experts, *weights = numbers.T.reshape(columns - 1, -1, top_k)
        yield Rows(path, experts, weights[0] if weights else None, _place_by_line(batch, top_k))


def _split(lines: list[bytes]) -> tuple[list[str], list[str]]:
    """Each line's first cell, and the others."""
    texts = [line.decode().replace('"', "") for line in lines]
    return [text.partition(",")[0] for text in texts], [text.partition(",")[2] for text in texts]


def _numbers(texts: list[str], columns: int, delimiter: str | None) -> npt.NDArray[np.float64]:
    """Texts of `columns` numbers each; raises ValueError for anything else."""
    if not all(text.strip() for text in texts):
        raise ValueError("no experts")
    numbers = np.loadtxt(texts, delimiter=delimiter, comments=None, ndmin=2)
    if numbers.shape[1] != columns:
        raise ValueError(f"{numbers.shape[1]} numbers where {columns} are expected")
    return numbers


# By first bytes; any other text is taken for CSV.
_FILES = {
    b"\x93NUMPY": _Format(_npy, ("layer",)),
    b"PK": _Format(_npz, ("array", "layer")),
    b"[": _Format(_json_lists, ("layer",)),
    b"": _Format(_csv, ()),
}
# JSON lines, by a field of the first record.
_RECORDS = {
    "top_indices": _Format(_megatron, (*_MEGATRON_LAYER, "rank")),
    "routed_experts": _Format(_vllm_lines, ("layer",)),
    "experts": _Format(_plain_lines, ()),
}
