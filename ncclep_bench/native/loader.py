"""Kernels by name: from source file and headers to a launch with arguments by name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ncclep_bench.errors import BenchError
from ncclep_bench.runtime.device_contract import Device

ROOT = Path(__file__).parent
USUAL_SHARED_BYTES = 48 << 10
"""What a block has of any device, unless a kernel is let have more."""

Launch = Callable[[], None]
"""One kernel, ready to be enqueued any number of times."""

_MOST_PREPARED = 64

_KERNEL = re.compile(r"^NCCLEP_EXPORT\((\w+)\)", re.MULTILINE)
_PARAMETER = r"__global__[^;{{}}]*\b{kernel}\(const (\w+) "
_FIELD = re.compile(r"^    (?:const )?\w+\*? (\w+)(?:\[(\d+)\])?;", re.MULTILINE)


class Field(NamedTuple):
    """One field of a struct of arguments: 64 bits, or that many times over."""

    name: str
    words: int


class Kernel(NamedTuple):
    """A kernel as its source declares it."""

    name: str
    source: Path
    fields: tuple[Field, ...]


@cache
def kernels() -> dict[str, Kernel]:
    """Every kernel of the sources, with the fields of its one struct parameter in their order."""
    headers = "".join(path.read_text() for path in sorted((ROOT / "include").rglob("*.cuh")))
    found = {}
    for source in sorted((ROOT / "kernels").glob("*.cu")):
        text = source.read_text()
        for name in _KERNEL.findall(text):
            parameter = re.search(_PARAMETER.format(kernel=name), text)
            assert parameter is not None, f"{source.name}: {name} does not take one struct"
            body = re.search(rf"^struct {parameter[1]} {{\n(.*?)^}};", text + headers, re.MULTILINE | re.DOTALL)
            assert body is not None, f"{source.name}: struct {parameter[1]} is not declared"
            fields = tuple(Field(field, int(count or 1)) for field, count in _FIELD.findall(body[1]))
            found[name] = Kernel(name, source, fields)
    return found


@cache
def digest(root: Path = ROOT) -> str:
    """Sixteen hexadecimal digits over all headers, for compilers whose cache sees only the source."""
    content = hashlib.sha256()
    for path in sorted((root / "include").rglob("*")):
        if path.is_file():
            content.update(path.name.encode() + b"\0" + path.read_bytes())
    return content.hexdigest()[:16]


def pack(kernel: Kernel, values: dict[str, Any]) -> npt.NDArray[np.uint64]:
    """The struct of arguments; every value 64 bits. Raises BenchError for a field whose value is missing or wrong."""
    packed: list[int] = []
    for field in kernel.fields:
        if field.name not in values:
            raise BenchError(f"kernel {kernel.name}: argument {field.name} is missing")
        value = values[field.name]
        many = [value] if field.words == 1 else [*value, *[0] * (field.words - len(value))]
        if len(many) != field.words or not all(-(1 << 63) <= word < 1 << 64 for word in many):
            raise BenchError(f"kernel {kernel.name}: argument {field.name} cannot be {value}")
        packed += many
    return np.array([word % (1 << 64) for word in packed], dtype=np.uint64)


class Launches:
    """Launches that come again, by what tells them apart; now and then all are forgotten."""

    def __init__(self) -> None:
        self._prepared: dict[Hashable, Launch] = {}

    def get(self, key: Hashable, prepare: Callable[[], Launch]) -> Launch:
        """The launch of `key`, which `prepare` makes if there is none."""
        if key not in self._prepared:
            if len(self._prepared) == _MOST_PREPARED:
                self.clear()
            self._prepared[key] = prepare()
        return self._prepared[key]

    def clear(self) -> None:
        self._prepared.clear()


class Launcher:
    """All kernels, compiled for one device: no later launch makes peers wait for a compiler.

    `defines`: macros of a build of its own, NAME=VALUE each; include/ncclep/delays.cuh says what NCCLEP_DELAYS does.
    `early`: launches may begin while the kernel before still runs, where the device allows it.
    """

    def __init__(self, device: Device, defines: Sequence[str] = (), *, early: bool = False) -> None:
        self.device, self.early = device, early
        all_defines = (f"NCCLEP_DIGEST=0x{digest()}", *defines)
        self._functions = {
            kernel.name: device.function(kernel.source, ROOT / "include", kernel.name, all_defines)
            for kernel in kernels().values()
        }

    def prepare(self, name: str, values: dict[str, Any], blocks: int, threads: int, shared_bytes: int) -> Launch:
        """What enqueues a kernel with these arguments, any number of times."""
        kernel = kernels()[name]
        if shared_bytes > USUAL_SHARED_BYTES:
            self.device.allow_shared(self._functions[name], shared_bytes)
        words = pack(kernel, values)
        return self.device.prepare(self._functions[name], blocks, threads, shared_bytes, words, early=self.early)
