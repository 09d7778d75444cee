"""Scenario files: where they are, what may stand in them, and what `--set` changes."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from ncclep_bench.errors import InputError
from ncclep_bench.model.case import Case
from ncclep_bench.model.dtype import DTYPES
from ncclep_bench.model.ep_config import Positive, Transport
from ncclep_bench.model.measurement import COLUMNS
from ncclep_bench.model.scenario import ExpertLoad, Reference, Scenario, Timing
from ncclep_bench.model.toml_file import convert, load_toml, shown
from ncclep_bench.registry import BACKENDS, COLLECTIVES, ROUTINGS

# What a setting makes meaningless, so that `--set batch_size=4` works on a file that lists `tokens`.
_REPLACES = {
    "tokens": ("batch_size", "tokens_per_sequence"),
    "batch_size": ("tokens",),
    "num_experts": ("experts_per_rank",),
    "experts_per_rank": ("num_experts",),
    "routing": ("routing_param",),
}


def find_scenarios() -> dict[str, Path]:
    """Name → file of every scenario: those of `./scenarios`, and the packaged ones whose name is not taken there."""
    folders = (_packaged_folder(), Path("scenarios"))
    found = {path.stem: path for folder in folders for path in folder.glob("*.toml")}
    return dict(sorted(found.items()))


def load_scenario(name_or_path: str | Path) -> Scenario:
    """The scenario in a file, or the one of that bare name.

    Raises InputError with file, key, value and what is allowed; for an unknown name with the known ones.
    """
    path = _locate(str(name_or_path))
    if path.is_dir():
        raise InputError(
            f"{shown(str(path))}: is a folder",
            hint="give scenario files, or names from ncclep-bench scenarios list",
        )
    raw = load_toml(path)
    file = shown(str(path))
    record = _converted(raw, _tables(), file=file)
    timing = record.pop("timing", Timing())
    references = record.pop("reference", [])
    _check_timing(timing, file=file)
    _check_references(references, file=file)
    return Scenario(
        name=path.stem,
        file=str(path),
        text=path.read_text(encoding="utf-8"),
        description=record.pop("description", ""),
        timing=timing,
        reference=references,
        expert_load=record.pop("expert_load", {}),
        axes={key: value if isinstance(value, list) else [value] for key, value in record.items()},
    )


def with_overrides(scenario: Scenario, settings: Sequence[str], *, typed: bool = True) -> Scenario:
    """The scenario with each `key=value` of `settings` in place of what its file says.

    Keys are axes or fields of `[timing]`; a value is TOML, or bare words with commas between them.
    Setting one of `tokens` and `batch_size`, or of `num_experts` and `experts_per_rank`, drops the other; `routing`
    drops `routing_param`.
    Raises InputError that quotes the setting at fault as `--set`, unless nobody has `typed` them as that.
    """

    def quoted(setting: str) -> str:
        return f"--set {setting}" if typed else scenario.file

    axes, timing = dict(scenario.axes), scenario.timing
    chosen: set[str] = set()
    timed = ""
    for setting in settings:
        key, value = _parsed(setting)
        record = _converted({key: value}, _timing_types(), file=quoted(setting))
        if key in _timing_types():
            timing = msgspec.structs.replace(timing, **record)
            timed = setting
            continue
        chosen.add(key)
        axes[key] = record[key] if isinstance(record[key], list) else [record[key]]
        for replaced in _REPLACES.get(key, ()):
            if replaced not in chosen:
                axes.pop(replaced, None)
    if timed:
        _check_timing(timing, file=shown(quoted(timed)))
    said = (*scenario.settings, *settings) if typed else scenario.settings
    return msgspec.structs.replace(scenario, axes=axes, timing=timing, settings=said)


@cache
def axis_types() -> dict[str, Any]:
    """Type of one value of every axis: the fields of Case, registries' names spelt out, and `experts_per_rank`."""
    types = get_type_hints(Case, include_extras=True)
    del types["scenario"]
    for key, names in (("collective", COLLECTIVES), ("backend", BACKENDS), ("routing", ROUTINGS), ("dtype", DTYPES)):
        types[key] = Literal[tuple(names)]
    return types | {"transport": Transport, "experts_per_rank": Positive}


def _packaged_folder() -> Path:
    package = Path(__file__).parents[1]
    inside_the_wheel = package / "scenarios"
    return inside_the_wheel if inside_the_wheel.is_dir() else package.parent / "scenarios"


def _locate(name_or_path: str) -> Path:
    path = Path(name_or_path)
    if path.name != name_or_path or path.suffix == ".toml":
        return path
    scenarios = find_scenarios()
    if name_or_path not in scenarios:
        if (lying_here := Path(f"{name_or_path}.toml")).is_file():
            raise InputError(
                f"unknown scenario {name_or_path!r}",
                hint=f"there is a file {lying_here}: give it as a path, ./{lying_here}",
            )
        close = difflib.get_close_matches(name_or_path, scenarios, n=1)
        raise InputError(
            f"unknown scenario {name_or_path!r}",
            hint=(f"did you mean {close[0]!r}? " if close else "")
            + f"known: {', '.join(scenarios)}; or give the path of a .toml file",
        )
    return scenarios[name_or_path]


def _tables() -> dict[str, Any]:
    return {
        "description": str,
        "timing": Timing,
        "reference": list[Reference],
        "expert_load": dict[str, ExpertLoad],
    }


@cache
def _timing_types() -> dict[str, Any]:
    return get_type_hints(Timing, include_extras=True)


def _converted(raw: Mapping[str, Any], others: Mapping[str, Any], *, file: str) -> dict[str, Any]:
    """The keys of `raw` with typed values: axes as scalar or list, whichever was written, and `others`."""
    one_or_more = {
        key: Annotated[list[type_], Meta(min_length=1)] if isinstance(raw.get(key), list) else type_  # type: ignore[valid-type]
        for key, type_ in axis_types().items()
    }
    fields = [(key, type_, None) for key, type_ in (one_or_more | dict(others)).items()]
    record = msgspec.defstruct("ScenarioFile", fields, forbid_unknown_fields=True)
    converted = msgspec.structs.asdict(convert(raw, record, file=file))
    return {key: converted[key] for key in raw}


def _check_timing(timing: Timing, *, file: str) -> None:
    if timing.min_samples > timing.max_samples:
        raise InputError(
            f"{file}: key `timing.min_samples`: value {timing.min_samples} exceeds max_samples {timing.max_samples}",
            hint=f"allowed: 1 to {timing.max_samples}, or a larger max_samples",
        )


def _check_references(references: Iterable[Reference], *, file: str) -> None:
    for index, reference in enumerate(references):
        place = f"{file}: key `reference[{index}]"
        for key, column in [("column", reference.column), *(("where", key) for key in reference.where)]:
            if column not in COLUMNS:
                close = difflib.get_close_matches(column, COLUMNS, n=1)
                raise InputError(
                    f"{place}.{key}`: {shown(column)!r} is no column",
                    hint=(f"did you mean `{close[0]}`? " if close else "") + f"allowed: {', '.join(COLUMNS)}",
                )
        if reference.role not in ("ep", "traditional"):
            raise InputError(
                f"{place}.role`: value {reference.role!r} is not usable", hint='allowed: "ep", "traditional"'
            )
        if not math.isfinite(reference.value):
            raise InputError(f"{place}.value`: value {reference.value} is not usable", hint="allowed: a finite number")


def _parsed(setting: str) -> tuple[str, Any]:
    key, equals, text = setting.partition("=")
    if not equals:
        raise InputError(f"--set {shown(setting)}: no value", hint="write --set KEY=VALUE, as in --set tokens=64,128")
    value = _toml_value(text)
    if value is None:
        # What follows # selects within a trace and has commas of its own: "trace.jsonl#layer=3,step=2".
        listed = [text] if "#" in text else text.strip().removeprefix("[").removesuffix("]").split(",")
        words = [word.strip() for word in listed]
        values = [word if (parsed := _toml_value(word)) is None else parsed for word in words]
        value = values if len(values) > 1 or text.strip().startswith("[") else values[0]
    return key.strip().removeprefix("timing."), value


def _toml_value(text: str) -> Any:
    """`text` as one TOML value, None where it is none."""
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return None
    return document["value"] if len(document) == 1 else None
