"""TOML files into typed records, with errors that name file, key, value and what is allowed."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from ncclep_bench.errors import InputError

T = TypeVar("T")

MAX_FILE_BYTES = 16 << 20

# msgspec's wording; tests hold every form of it.
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_STEP = re.compile(r"\.([^.\[`]+)|\[(\d+|\.\.\.)\]")


def load_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises InputError: no regular file, unreadable, over 16 MiB, not UTF-8, or bad syntax with its line and column.
    """
    file = shown(str(path))
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{file}: is a folder or a device, not a file")
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{file}: cannot be read: {reason}", hint="give the path of a TOML file") from error
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"{file}: larger than {MAX_FILE_BYTES >> 20} MiB, the most that is read")
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{file}: line {line}: not UTF-8 text", hint="save the file as UTF-8") from error
    except ValueError as error:
        raise InputError(f"{file}: not valid TOML: {error}") from error
    except RecursionError as error:
        raise InputError(f"{file}: nested too deeply") from error


def convert(raw: Mapping[str, Any], type_: type[T], *, file: str) -> T:
    """`raw` as a `type_`; raises InputError naming file, key, value and what is allowed, with the nearest known key."""
    try:
        return msgspec.convert(raw, type_)
    except msgspec.ValidationError as error:
        raise InputError(f"{shown(file)}: {_explain(raw, type_, str(error))}") from error
    except RecursionError as error:
        raise InputError(f"{shown(file)}: nested too deeply") from error


def shown(text: str) -> str:
    """`text` without control characters, so that a name from a file cannot drive a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _explain(raw: Mapping[str, Any], type_: type[Any], message: str) -> str:
    problem, _, place = message.partition(" - at `")
    keys, value, expected = _walk(raw, type_, message, place)
    if unknown := _UNKNOWN.fullmatch(problem):
        known = _fields(expected)
        close = difflib.get_close_matches(unknown[1], known, n=1)
        advice = f"did you mean `{close[0]}`? " if close else ""
        return (
            f"key `{_dotted([*keys, unknown[1]])}`: unknown key (value {_value(value[unknown[1]])}); "
            f"{advice}allowed: {', '.join(known)}"
        )
    if missing := _MISSING.fullmatch(problem):
        allowed = _described(_fields(expected)[missing[1]])
        return f"key `{_dotted([*keys, missing[1]])}`: is required and missing; allowed: {allowed}"
    where = f"key `{_dotted(keys)}`" if keys else "the file"
    return f"{where}: value {_value(value)} is not usable; allowed: {_described(expected)}"


def _walk(raw: Any, type_: type[Any], message: str, place: str) -> tuple[list[str | int], Any, inspect.Type]:
    """Follow msgspec's `$.a[0][...].b`: the keys, the raw value and the type found there."""
    keys: list[str | int] = []
    value, expected = raw, inspect.type_info(type_)
    for field, index in _STEP.findall(place):
        step: str | int = field or (int(index) if index.isdigit() else index)
        if index == "...":  # msgspec leaves out which key of a table it was: the one that fails alone as all do
            step = next(key for key in value if _fails_alone(raw, type_, keys, key, message))
        expected = _inner(expected, step)
        value = value[step]
        keys.append(step)
    return keys, value, expected


def _fails_alone(raw: Any, type_: type[Any], keys: list[str | int], key: str, message: str) -> bool:
    try:
        msgspec.convert(_only(raw, keys, key), type_)
    except msgspec.ValidationError as error:
        return str(error) == message
    return False


def _only(value: Any, keys: list[str | int], key: str) -> Any:
    """A copy of `value` whose table at `keys` has nothing but `key`."""
    if not keys:
        return {key: value[key]}
    copy: Any = dict(value) if isinstance(value, Mapping) else list(value)
    copy[keys[0]] = _only(value[keys[0]], keys[1:], key)
    return copy


def _alternatives(expected: inspect.Type) -> Iterator[inspect.Type]:
    for option in expected.types if isinstance(expected, inspect.UnionType) else (expected,):
        if isinstance(option, inspect.Metadata):
            yield from _alternatives(option.type)
        elif not isinstance(option, inspect.NoneType):
            yield option


def _fields(expected: inspect.Type) -> dict[str, inspect.Type]:
    for option in _alternatives(expected):
        if isinstance(option, inspect.StructType):
            return {field.encode_name: field.type for field in option.fields}
    return {}


def _inner(expected: inspect.Type, step: str | int) -> inspect.Type:
    for option in _alternatives(expected):
        if isinstance(option, inspect.StructType) and step in _fields(option):
            return _fields(option)[str(step)]
        if isinstance(option, inspect.DictType) and isinstance(step, str):
            return option.value_type
        if isinstance(option, inspect.CollectionType) and isinstance(step, int):
            return option.item_type
    return inspect.AnyType()


def _described(expected: inspect.Type) -> str:
    """What `expected` admits, in words a person writes TOML by."""
    return " or ".join(_described_one(option) for option in _alternatives(expected)) or "nothing"


def _described_one(option: inspect.Type) -> str:
    match option:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType() | inspect.FloatType():
            kind = "a whole number" if isinstance(option, inspect.IntType) else "a number"
            bounds = [
                f"{words} {bound}"
                for words, bound in (
                    ("from", option.ge),
                    ("above", option.gt),
                    ("to", option.le),
                    ("below", option.lt),
                    ("in multiples of", option.multiple_of),
                )
                if bound is not None
            ]
            return " ".join([kind, *bounds])
        case inspect.StrType():
            return "text"
        case inspect.LiteralType():
            return ", ".join(_value(value) for value in option.values)
        case inspect.CollectionType():
            fewest = f" (at least {option.min_length} long)" if option.min_length else ""
            return f"a list{fewest}, each item {_described(option.item_type)}"
        case inspect.StructType():
            return f"a table with {', '.join(_fields(option))}"
        case inspect.DictType():
            return f"a table, each value {_described(option.value_type)}"
        case _:
            return "any value"


def _dotted(keys: list[str | int]) -> str:
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return shown(text.removeprefix("."))


def _value(value: Any) -> str:
    """`value` as TOML would have it, at most 60 characters."""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
