"""Settings of the job: variables and nccl.conf lines in the order in which NCCL heeds them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from ncclep_bench.model.facts import Facts
from ncclep_bench.runtime.place import VARIABLES

ENVIRONMENT = "environment"
JOB_VARIABLES = re.compile(
    r"(NCCL|NVSHMEM|UCX|UCCL|CUDA|TORCH|MPIR_CVAR|OMPI_MCA|FI|I_MPI|SGLANG|VLLM|DEEPEP|DEEP_EP)_\w+"
    r"|LD_PRELOAD|LD_LIBRARY_PATH|" + "|".join(sorted(VARIABLES))
)
"""Names of variables that decide how a job communicates."""

_NUMBER = re.compile(r"\s*([+-]?)(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)")


class Setting(msgspec.Struct, frozen=True):
    """One assignment and where it was made: `environment`, or a file and line."""

    name: str
    value: str
    source: str

    @property
    def number(self) -> int:
        """The number NCCL makes of the value: C's strtoll with base 0, so text that is no number counts as 0."""
        match = _NUMBER.match(self.value)
        if match is None:
            return 0
        digits = match[2]
        base = 16 if digits[:2] in ("0x", "0X") else 8 if digits[0] == "0" else 10
        return int(digits, base) * (-1 if match[1] == "-" else 1)

    def __str__(self) -> str:
        return f"{self.name}={self.value} ({self.source})"


class Pattern(NamedTuple):
    """NCCL's interface and HCA lists: `^` excludes, `=` matches whole names, otherwise names match by prefix."""

    exclude: bool
    exact: bool
    names: tuple[str, ...]

    def matches(self, name: str, candidates: list[str]) -> list[str]:
        """Those of `candidates` that the list's entry `name` picks."""
        return [found for found in candidates if (found == name if self.exact else found.startswith(name))]


def pattern_of(text: str) -> Pattern:
    """The pattern in a value of NCCL_SOCKET_IFNAME or NCCL_IB_HCA; ports after a colon are left out."""
    exclude = text.startswith("^")
    exact = text[exclude : exclude + 1] == "="
    names = text[exclude + exact :].split(",")
    return Pattern(exclude, exact, tuple(name.split(":")[0].strip() for name in names if name.strip()))


class Settings:
    """The setting that counts for each name, and those it hides."""

    def __init__(self, assignments: list[Setting]) -> None:
        self.assignments = assignments
        self.effective: dict[str, Setting] = {}
        for setting in assignments:
            self.effective.setdefault(setting.name, setting)

    def get(self, name: str) -> Setting | None:
        """The setting in force; an empty value counts as unset, as NCCL has it."""
        setting = self.effective.get(name)
        return setting if setting is not None and setting.value else None

    def on(self, name: str) -> Setting | None:
        """The setting if it switches on: a number that is not 0."""
        setting = self.get(name)
        return setting if setting is not None and setting.number != 0 else None

    def off(self, name: str) -> Setting | None:
        """The setting if it switches off: set, and 0 as NCCL reads it."""
        setting = self.get(name)
        return setting if setting is not None and setting.number == 0 else None

    def starting(self, *prefixes: str) -> Iterator[Setting]:
        """Settings in force whose name starts with one of `prefixes`."""
        return (setting for name, setting in self.effective.items() if name.startswith(prefixes) and setting.value)


def settings_of(facts: Facts) -> Settings:
    """The settings in `facts`."""
    return Settings(facts.read("job.settings", list[Setting]))
