"""Bytes, seconds and bandwidth: parse what people write, format what people read."""

from __future__ import annotations

import re

from ncclep_bench.errors import InputError

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_FACTORS = {
    "": 1,
    "b": 1,
    "k": 1 << 10,
    "kib": 1 << 10,
    "kb": 10**3,
    "m": 1 << 20,
    "mib": 1 << 20,
    "mb": 10**6,
    "g": 1 << 30,
    "gib": 1 << 30,
    "gb": 10**9,
    "t": 1 << 40,
    "tib": 1 << 40,
    "tb": 10**12,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str) -> int:
    """Bytes of `8M`, `1.5GiB`, `4096`; a bare letter is binary, as in nccl-tests.

    Raises InputError for anything else, a fraction of a byte included.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _FACTORS:
        raise InputError(f"not a size in bytes: {text!r}", hint="write 4096, 8M, 1.5GiB")
    count = float(match[1]) * _FACTORS[match[2].lower()]
    if not count.is_integer():
        raise InputError(f"not a whole number of bytes: {text!r}", hint="write 4096, 8M, 1.5GiB")
    return int(count)


def format_bytes(count: float) -> str:
    """`count` bytes with a binary unit and three digits: `1.50 GiB`."""
    value = float(count)
    for unit in _BINARY[:-1]:
        if abs(value) < 1024:
            break
        value /= 1024
    else:
        unit = _BINARY[-1]
    return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def format_us(microseconds: float) -> str:
    """`microseconds` in the unit that reads best: `950 ns`, `12.3 us`, `4.56 ms`, `2.1 s`."""
    for limit, factor, unit in ((1, 1e3, "ns"), (1e3, 1.0, "us"), (1e6, 1e-3, "ms")):
        if abs(microseconds) < limit:
            return f"{microseconds * factor:.3g} {unit}"
    return f"{microseconds * 1e-6:.3g} s"


def gbps(byte_count: float, microseconds: float) -> float:
    """10⁹ bytes per second."""
    return byte_count / microseconds * 1e-3
