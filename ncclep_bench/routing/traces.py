"""Routing recorded from a real router, replayed."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ncclep_bench.errors import InputError
from ncclep_bench.model.case import Case
from ncclep_bench.model.scenario import ExpertLoad
from ncclep_bench.routing.token_routing import Chosen
from ncclep_bench.routing.trace_formats import MAX_ENTRIES, Rows, Wanted, bad_trace, reader_of


class RecordedTrace:
    """Global token g takes the trace's token g; a trace shorter than the case starts again from its first token.

    `routing_param` = "PATH" or "PATH#key=value,…", relative to the scenario file's folder. PATH is a file, a glob or a
    folder of *.jsonl; the format is told by content:

    - Megatron-Core router trace, JSON lines with step, layer, rank, num_tokens, topk, top_indices; tokens rank by rank.
      Selectors step, layer, stage, block, mtp_idx, rank; what is not selected is that of the first record that fits.
    - vLLM routed experts [tokens, layers, top_k] as .npy, .npz (selector array), nested JSON lists, or JSON lines with
      routed_experts (lists, or base64 of a .npy). Selector layer, default 0.
    - CSV `token,expert_0,…[,weight_0,…]`, `token,experts[,weights]` (ids separated by spaces or ;), or one choice a row
      `token,expert[,weight]`; JSON lines with experts and optional token and weights. Tokens count in file order.

    Weights are normalised to sum 1 over a token's choices; a trace without weights gets random ones by seed.
    Raises InputError with file, line or token, value, and what is allowed.
    """

    def __init__(self, case: Case, *, expert_load: Mapping[str, ExpertLoad], directory: Path | None) -> None:
        param = case.routing_param
        name, _, selection = param.partition("#") if isinstance(param, str) else ("", "", "")
        if not name:
            raise InputError(
                f'routing_param {param!r} names no file for routing "trace"', hint='allowed: "PATH" or "PATH#layer=3"'
            )
        try:
            paths = _files(directory or Path(), name)
            stamps = tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths)
            self._experts, self._weights = _load(stamps, _selector(selection), case.num_experts, case.top_k or 1)
        except (OSError, ValueError) as error:
            raise InputError(f"trace {name}: {error}", hint="routing_param names a readable file") from error

    def choose(self, first_token: int, count: int, rng: np.random.Generator) -> Chosen:
        rows = np.arange(first_token, first_token + count) % len(self._experts)
        return self._experts[rows], None if self._weights is None else self._weights[rows]


def _files(directory: Path, name: str) -> list[Path]:
    """The trace's files in natural order of their names (rank 2 before rank 10)."""
    path = directory / name
    if path.is_dir():
        found = list(path.glob("*.jsonl"))
    elif path.exists():
        found = [path]
    else:
        found = [Path(match) for match in glob.glob(str(path))]
    files = [file for file in found if file.is_file()]
    if not files:
        raise InputError(
            f"trace {path}: no such file, or no *.jsonl in that folder",
            hint="routing_param names a file, a glob or a folder, relative to the scenario file's folder",
        )
    return sorted(files, key=_natural_order)


def _natural_order(file: Path) -> list[tuple[str, int]]:
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", file.name)]


def _selector(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [tuple(item.split("=", 1)) for item in text.split(",") if item]
    if any(len(pair) != 2 for pair in pairs):
        raise InputError(f"routing_param: {text!r} after # selects nothing", hint='allowed: "key=value,key=value"')
    return tuple((key.strip(), value.strip()) for key, value in pairs)


@lru_cache(maxsize=2)
def _load(
    stamps: tuple[tuple[Path, int, int], ...], selector: tuple[tuple[str, str], ...], num_experts: int, top_k: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64] | None]:
    """All selected tokens, checked; size and time of the files are in the key, so a rewritten trace is read again."""
    wanted = Wanted(dict(selector), top_k)
    paths = [path for path, size, _ in stamps if size]
    if not paths:
        bad_trace(stamps[0][0], "", "the file is empty")
    experts: list[npt.NDArray[np.int32]] = []
    weights: list[npt.NDArray[np.float64]] = []
    entries = 0
    for rows in reader_of(paths[0], wanted)(paths, wanted):
        entries += rows.experts.size
        if entries > MAX_ENTRIES:
            bad_trace(rows.path, rows.place(0), f"more than {MAX_ENTRIES} choices", "shorten the trace")
        _check(rows, num_experts)
        if experts and (rows.weights is None) != (not weights):
            bad_trace(rows.path, rows.place(0), "weights for some tokens", "give them for all tokens or for none")
        experts.append(rows.experts.astype(np.int32))
        if rows.weights is not None:
            weights.append(rows.weights)
    if not entries:
        bad_trace(paths[0], "", "no tokens")
    return np.concatenate(experts), np.concatenate(weights) if weights else None


def _check(rows: Rows, num_experts: int) -> None:
    experts, weights = rows.experts, rows.weights
    for token, choice in np.argwhere(~((experts >= -1) & (experts < num_experts) & (experts == np.floor(experts))))[:1]:
        allowed = f"allowed: 0 to {num_experts - 1}, or −1 for a masked choice"
        bad_trace(rows.path, rows.place(token), f"expert {experts[token, choice]} does not exist", allowed)
    ascending = np.sort(experts, axis=1)
    repeated = (ascending[:, 1:] == ascending[:, :-1]) & (ascending[:, 1:] >= 0)
    for token, choice in np.argwhere(repeated)[:1]:
        hint = "a token's experts are distinct; a layer without experts records zeros, select another"
        bad_trace(rows.path, rows.place(token), f"expert {ascending[token, choice]} twice in one token", hint)
    if weights is not None:
        for token, choice in np.argwhere(~np.isfinite(weights) | (weights < 0))[:1]:
            bad_trace(rows.path, rows.place(token), f"weight {weights[token, choice]}", "allowed: finite, 0 or more")
