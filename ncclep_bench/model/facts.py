"""Facts: what was read of one machine and one rank, with where it came from, as a JSON document."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from ncclep_bench.errors import InputError

T = TypeVar("T")

SCHEMA = 1

NOT_COLLECTED = "was not collected"

State = Literal["value", "absent", "not_permitted", "failed"]


class Fact(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing read, or why it could not be; `source` is a file, a variable or a command."""

    state: State
    source: str
    value: Any = None
    reason: str = ""

    @property
    def missing(self) -> str:
        """Why there is no value."""
        state = self.state.replace("_", " ")
        return f"{state}: {self.reason}" if self.state == "not_permitted" and self.reason else self.reason or state


def told(source: str, value: object) -> Fact:
    """A fact with a value, made of what JSON holds."""
    return Fact("value", source, msgspec.to_builtins(value))


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All facts of one rank: `sections[section][name]`; elsewhere a fact is called `section.name`."""

    schema: int = SCHEMA
    host: str
    rank: int | None = None
    sections: dict[str, dict[str, Fact]]

    def having(self, facts: Mapping[str, Fact]) -> Facts:
        """The same with these by name, in place of what it says of them."""
        sections = {section: dict(own) for section, own in self.sections.items()}
        for name, fact in facts.items():
            section, _, key = name.partition(".")
            sections.setdefault(section, {})[key] = fact
        return msgspec.structs.replace(self, sections=sections)

    def fact(self, name: str) -> Fact:
        """The fact called `name`; one that nobody read is absent."""
        section, _, key = name.partition(".")
        return self.sections.get(section, {}).get(key) or Fact("absent", name, reason=NOT_COLLECTED)

    def read(self, name: str, type_: type[T]) -> T:
        """The value of `name` as a `type_`. Raises InputError where there is no value or it has another shape."""
        fact = self.fact(name)
        if fact.state != "value":
            raise InputError(f"fact {name}: {fact.state.replace('_', ' ')}: {fact.reason} ({fact.source})")
        try:
            return msgspec.convert(fact.value, type_)
        except msgspec.ValidationError as error:
            raise InputError(f"fact {name} ({fact.source}): {error}") from error

    def get(self, name: str, type_: type[T]) -> T | None:
        """As `read`, but None where there is no value."""
        return self.read(name, type_) if self.fact(name).state == "value" else None

    def to_json(self) -> bytes:
        """The document, indented, one fact per few lines; bytes of a name that are no UTF-8 become `?`."""
        try:
            data = msgspec.json.encode(self)
        except UnicodeEncodeError:
            data = json.dumps(msgspec.to_builtins(self), ensure_ascii=False).encode(errors="replace")
        return msgspec.json.format(data, indent=2) + b"\n"


def facts_from_json(data: bytes, *, file: str) -> Facts:
    """The facts in `data`; raises InputError for anything but a facts document of this schema version."""
    try:
        facts = msgspec.json.decode(data, type=Facts)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError(f"{file}: not a facts document: {error}", hint="ncclep-doctor collect writes one") from error
    if facts.schema != SCHEMA:
        raise InputError(f"{file}: facts of schema version {facts.schema}, this is version {SCHEMA}")
    return facts
