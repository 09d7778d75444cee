from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ncclep_bench.errors import BenchError, InputError
from ncclep_bench.model.case import Case
from ncclep_bench.model.measurement import SCHEMA_VERSION, Measurement, RunHeader
from ncclep_bench.results.store import RunWriter, read_run, sole_writer

HEADER = RunHeader(started_at="2026-11-29T12:00:00Z", command=["ncclep-bench"], scenarios=[], environment={"host": "a"})


def record(tokens: int, **fields: Any) -> Measurement:
    case = Case(scenario="s", collective="dispatch", ranks=2, num_experts=4, tokens=tokens)
    return Measurement(case=case, **({"outcome": "passed", "verified": True} | fields))


def test_what_was_appended_is_read_back_as_it_was(tmp_path: Path) -> None:
    records = (record(1, samples_us=[[1.0, 2.5]]), record(2, outcome="waived", verified=None, reason="too large"))
    with RunWriter(tmp_path / "new" / "folder", HEADER) as writer:
        for each in records:
            writer.append(each)
    run = read_run(tmp_path / "new" / "folder")
    assert run.header == HEADER
    assert run.measurements == records
    assert run.warnings == ()
    assert read_run(run.path).measurements == records


def test_the_file_exists_before_anything_was_measured_and_each_line_is_there_at_once(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, HEADER)
    assert read_run(tmp_path).measurements == ()
    writer.append(record(1))
    assert read_run(tmp_path).measurements == (record(1),)
    writer.close()
    writer.close()


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    RunWriter(tmp_path, HEADER).close()
    with pytest.raises(InputError, match=r"holds a run already\n.*--resume"):
        RunWriter(tmp_path, HEADER)


@pytest.mark.parametrize("below", ["file", "file/folder"])
def test_an_output_folder_that_cannot_be_made_is_an_input_error_with_the_path(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="file") as caught:
        RunWriter(tmp_path / below, HEADER)
    assert caught.value.exit_code == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, HEADER)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, writer._descriptor)
    os.close(full)
    with pytest.raises(InputError, match=r"run\.jsonl: No space left"):
        writer.append(record(1))
    writer.close()


def test_a_line_that_could_not_be_read_back_is_refused_before_it_is_written(tmp_path: Path) -> None:
    with RunWriter(tmp_path, HEADER) as writer:
        writer.append(record(1))
        with pytest.raises(BenchError, match="samples_us"):
            writer.append(record(2, samples_us=[[float("nan")]]))
    assert read_run(tmp_path).measurements == (record(1),)


def test_a_run_that_was_not_finished_says_so_and_how_to_go_on(tmp_path: Path) -> None:
    planned = msgspec.structs.replace(HEADER, scenarios=[{"name": "small", "count": 2}])
    with RunWriter(tmp_path / "a run", planned) as writer:
        writer.append(record(1))

    (warning,) = read_run(tmp_path / "a run").warnings

    assert warning.endswith(
        f"1 of 2 cases, the run was not finished: ncclep-bench sweep --resume '{tmp_path / 'a run'}' goes on with it"
    )


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_a_last_line_cut_off_by_a_kill_is_left_out_and_said(tmp_path: Path, kept: int) -> None:
    with RunWriter(tmp_path, HEADER) as writer:
        writer.append(record(1))
        writer.append(record(2))
    path = tmp_path / "run.jsonl"
    *whole, last, _ = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*whole, last[:kept]]))
    run = read_run(tmp_path)
    assert run.measurements == (record(1),)
    assert "run.jsonl:3: the last line is cut off" in run.warnings[0]


def test_resuming_removes_a_cut_off_line_appends_and_keeps_both_headers(tmp_path: Path) -> None:
    with RunWriter(tmp_path, HEADER) as writer:
        writer.append(record(1))
    with (tmp_path / "run.jsonl").open("ab") as file:
        file.write(b'{"kind":"case","ca')
    again = msgspec.structs.replace(HEADER, started_at="later")
    with RunWriter.resume(tmp_path, again) as writer:
        writer.append(record(2))
    run = read_run(tmp_path)
    assert run.measurements == (record(1), record(2))
    assert (run.header, run.resumed, run.warnings) == (HEADER, (again,), ())


def test_a_later_line_of_the_same_case_and_repeat_replaces_the_earlier_in_its_place(tmp_path: Path) -> None:
    with RunWriter(tmp_path, HEADER) as writer:
        writer.append(record(1, outcome="error", verified=None, reason="rank 1 is gone"))
        writer.append(record(2))
        writer.append(record(1, repeat=1))
    with RunWriter.resume(tmp_path) as writer:
        writer.append(record(1))
    assert read_run(tmp_path).measurements == (record(1), record(2), record(1, repeat=1))


def test_a_damaged_line_in_the_middle_is_an_error_with_file_and_line(tmp_path: Path) -> None:
    with RunWriter(tmp_path, HEADER) as writer:
        writer.append(record(1))
    path = tmp_path / "run.jsonl"
    path.write_bytes(path.read_bytes() + b'{"kind": "case"}\n')
    with pytest.raises(InputError, match=r"run\.jsonl:3: .*`case`"):
        read_run(tmp_path)


@pytest.mark.parametrize("change", [{}, {"started_at": 7}])
def test_a_newer_schema_version_is_refused_with_what_to_do_even_when_its_header_looks_different(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    header = msgspec.to_builtins(HEADER) | {"schema_version": SCHEMA_VERSION + 1} | change
    (tmp_path / "run.jsonl").write_text(json.dumps(header) + "\n")
    with pytest.raises(InputError, match=r"schema version 2 is newer than 1.*\n.*upgrade"):
        read_run(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"kind":"run"', msgspec.json.encode(record(1)) + b"\n"])
def test_a_file_without_a_header_is_not_a_run(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.jsonl").write_bytes(content)
    with pytest.raises(InputError, match="no header"):
        read_run(tmp_path)


def test_a_path_that_is_not_there_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere: No such file"):
        read_run(tmp_path / "nowhere")


def test_an_unknown_field_of_a_line_is_ignored_so_that_additions_do_not_break_old_readers(tmp_path: Path) -> None:
    RunWriter(tmp_path, HEADER).close()
    line = msgspec.to_builtins(record(1)) | {"added_later": 1}
    with (tmp_path / "run.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert read_run(tmp_path).measurements == (record(1),)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_refused_and_not_read_for_ever(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "run.jsonl")
    with pytest.raises(InputError, match=r"run\.jsonl: is a folder or a device, not a file"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("payload_bytes", 1 << 63), ("wire_bytes", -1), ("tokens_total", 10**30), ("samples_us", [[1.0, -2.0]])],
)
def test_a_figure_that_no_run_can_have_is_refused_with_its_line_and_key(tmp_path: Path, field: str, value: Any) -> None:
    line = msgspec.to_builtins(record(1)) | {field: value}
    (tmp_path / "run.jsonl").write_bytes(msgspec.json.encode(HEADER) + b"\n" + json.dumps(line).encode() + b"\n")
    with pytest.raises(InputError, match=rf"run.jsonl:2: not a result line: .*{field}"):
        read_run(tmp_path)


def test_a_run_has_one_writer_at_a_time(tmp_path: Path) -> None:
    RunWriter(tmp_path, HEADER).close()
    with (
        sole_writer(tmp_path),
        pytest.raises(InputError, match="another sweep writes there now"),
        sole_writer(tmp_path),
    ):
        pass
    with sole_writer(tmp_path):
        pass
