from __future__ import annotations

import pytest

from ncclep_bench.errors import InputError
from ncclep_bench.units import format_bytes, format_us, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"), [("4096", 4096), ("8M", 8 << 20), ("1.5GiB", 3 << 29), ("2kB", 2000), (" 1 KiB ", 1024)]
)
def test_sizes_are_read_as_people_write_them(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "-1", "16.5", "1e3", "nan", "8 parsecs", "M"])
def test_what_is_no_whole_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"4096, 8M, 1\.5GiB"):
        parse_bytes(text)


def test_figures_are_written_with_the_unit_that_reads_best() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 << 29)] == ["0 B", "1023 B", "1.5 KiB", "1.5 GiB"]
    assert [format_us(us) for us in (0.5, 12.34, 4560.0, 2.1e6)] == ["500 ns", "12.3 us", "4.56 ms", "2.1 s"]
