"""The command line as a person uses it: what it prints, what it writes, how it ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ncclep_bench.cli import main
from ncclep_bench.results.frames import load_run
from ncclep_bench.results.store import read_run
from ncclep_bench.sweeps.load import load_scenario
from ncclep_bench.sweeps.run import default_directory, plan_sweep

ROOT = Path(__file__).parents[1]

SCENARIO = """
description = "two collectives in memory"
collective = ["dispatch", "dense_all_gather"]
backend = "in_memory"
ranks = 2
tokens = [4, 8]
hidden = 16
num_experts = 4
top_k = 2

[timing]
max_samples = 10
"""
CASES = 3


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    file = tmp_path / "small.toml"
    file.write_text(SCENARIO)
    return file


def bench(*arguments: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    # The folder of the sources comes last: the tests also run against an installed package.
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    return subprocess.run(
        # Like the installed command it has no look at the folder it is started in.
        [sys.executable, "-P", "-m", "ncclep_bench.cli", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_a_sweep_writes_its_files_and_prints_the_table_on_standard_output(scenario: Path, tmp_path: Path) -> None:
    done = bench("sweep", scenario, "--out", "run", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["report.html", "run.jsonl", "summary.csv"]
    assert "dispatch" in done.stdout
    assert f"{CASES} cases: {CASES} passed" in done.stdout
    assert f"[{CASES}/{CASES}] dense_all_gather" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    header = read_run(tmp_path / "run").header
    assert header.command == ["ncclep-bench", "sweep", str(scenario), "--out", "run"]
    assert header.scenarios[0]["text"] == SCENARIO
    assert {"host", "cpu", "cores_usable", "python", "mpi4py", "launcher"} <= set(header.environment)


CONTRADICTION = {"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "NVL", "NCCL_IB_DISABLE": "1"}


def test_what_the_doctor_finds_before_the_first_case_is_told_recorded_and_changes_no_exit_code(
    scenario: Path, tmp_path: Path
) -> None:
    done = bench("sweep", scenario, "--out", "run", cwd=tmp_path, **CONTRADICTION)

    assert done.returncode == 0, done.stderr
    told, _, rest = done.stderr.partition("[1/3]")
    assert "✗ NCCL006  peer access is disabled" in told
    assert "      → unset NCCL_P2P_DISABLE" in told.splitlines()
    assert "preflight: " in told
    assert "NCCL006" not in rest
    preflight = read_run(tmp_path / "run").header.preflight
    assert preflight is not None
    remarks = {remark.code: remark for remark in preflight.findings}
    assert (remarks["NCCL006"].verdict, remarks["NCCL001"].verdict) == ("error", "warning")
    assert remarks["NCCL001"].evidence == ["NCCL_IB_DISABLE=1 (environment)"]
    assert preflight.counts["ok"] > 10
    assert preflight.counts["not_run"] > 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "before the first case: NCCL006" in page
    assert "unset NCCL_IB_DISABLE" in page.partition('<section id="preflight">')[2]
    assert "  error NCCL006: peer access is disabled" in done.stdout


def test_a_sweep_without_preflight_asks_no_doctor(scenario: Path, tmp_path: Path) -> None:
    done = bench("sweep", scenario, "--no-preflight", "--out", "run", cwd=tmp_path, **CONTRADICTION)

    assert done.returncode == 0, done.stderr
    assert "preflight" not in done.stdout + done.stderr
    assert read_run(tmp_path / "run").header.preflight is None
    assert 'id="preflight"' not in (tmp_path / "run" / "report.html").read_text()


def test_a_resumed_run_says_what_the_doctor_found_each_time(scenario: Path, tmp_path: Path) -> None:
    bench("sweep", scenario, "--out", "run", cwd=tmp_path, **CONTRADICTION)
    bench("sweep", "--resume", "run", cwd=tmp_path, **CONTRADICTION)
    done = bench("sweep", "--resume", "run", cwd=tmp_path)

    run = read_run(tmp_path / "run")
    assert len(run.resumed) == 2
    assert done.stdout.count("preflight: ") == 2
    assert done.stdout.count("error NCCL006") == 1
    assert load_run(tmp_path / "run").preflights == (run.header.preflight, run.resumed[1].preflight)


def test_an_anonymised_run_names_neither_host_nor_user_and_can_be_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "home" / "jane"
    folder.mkdir(parents=True)
    (folder / "small.toml").write_text(SCENARIO)
    arguments = ("sweep", folder / "small.toml", "--anonymise")
    env = {"USER": "jane", "NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "NVL", "NCCL_TOPO_FILE": "/data/jane/topo.xml"}

    done = bench(*arguments, "--out", folder / "run", cwd=tmp_path, **env)

    assert done.returncode == 0, done.stderr
    run = read_run(folder / "run")
    assert run.header.environment["host"] == "host-1"
    assert run.header.command[2].endswith("/home/user-1/small.toml")
    assert [record.outcome for record in run.measurements] == ["passed"] * CASES
    for text in (done.stdout, *(file.read_text() for file in (folder / "run").iterdir())):
        assert "jane" not in text
        assert f'"{socket.gethostname()}"' not in text
    again = bench(*arguments, "--resume", folder / "run", cwd=tmp_path, **env)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("] dispatch") == 0
    assert read_run(folder / "run").resumed[0].environment["host"] == "host-1"


def test_a_case_that_names_a_person_is_not_swept_where_nobody_is_to_be_named(scenario: Path, tmp_path: Path) -> None:
    trace = tmp_path / "home" / "jane" / "trace.csv"
    trace.parent.mkdir(parents=True)
    trace.write_text("token,expert_0\n" + "".join(f"{token},{token % 4}\n" for token in range(8)))
    settings = ("--set", "routing=trace", "--set", f"routing_param={trace}", "--set", "top_k=1")

    done = bench("sweep", scenario, *settings, "--anonymise", "--out", "run", cwd=tmp_path)

    assert done.returncode == 2, done.stderr
    assert "routing_param" in done.stderr
    assert "names a person or a machine" in done.stderr
    assert not (tmp_path / "run").exists()


def test_the_default_folder_is_named_after_scenario_and_time(scenario: Path, tmp_path: Path) -> None:
    done = bench("sweep", scenario, "--format", "csv", cwd=tmp_path)

    (folder,) = (tmp_path / "reports").iterdir()
    assert folder.name.startswith("small-20")
    assert f"results: reports/{folder.name}" in done.stderr
    assert done.stdout == ""


def test_resume_measures_only_what_is_missing(scenario: Path, tmp_path: Path) -> None:
    bench("sweep", scenario, "--out", "run", "--format", "csv", cwd=tmp_path)
    file = tmp_path / "run" / "run.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]) + lines[-1][:40])

    done = bench("sweep", "--resume", "run", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("passed") == 1
    assert len(read_run(file).measurements) == CASES


def test_a_run_that_went_on_with_other_timing_says_so(scenario: Path, tmp_path: Path) -> None:
    bench("sweep", scenario, "--set", "budget_s=0.02", "--out", "run", "--format", "csv", cwd=tmp_path)
    done = bench("sweep", scenario, "--set", "budget_s=0.03", "--resume", "run", "--format", "console", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "budget_s 0.03 in place of 0.02" in " ".join(done.stdout.split())


def test_a_run_over_sizes_is_resumed_as_a_sweep_is(tmp_path: Path) -> None:
    bench("run", "dispatch", "--np", "2", "-B", "in_memory", "-b", "4", "-e", "8", "--out", "run", cwd=tmp_path)
    store = tmp_path / "run" / "run.jsonl"
    store.write_bytes(b"".join(store.read_bytes().splitlines(keepends=True)[:-1]))

    done = bench("sweep", "--resume", "run", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert len(read_run(tmp_path / "run").measurements) == 4


def test_resume_takes_the_file_of_a_run_and_other_ranks_but_no_other_cases(tmp_path: Path) -> None:
    arguments = ["run", "-B", "in_memory", "-b", "4", "--np", "2", "--out", "run", "--", "dispatch"]
    bench(*arguments, cwd=tmp_path)

    again = bench("sweep", "--resume", "run/run.jsonl", "--np", "2", "--format", "csv", cwd=tmp_path)
    refused = bench("sweep", "--resume", "run", "--set", "tokens=8", cwd=tmp_path)

    assert again.returncode == 0, again.stderr
    assert refused.returncode == 2
    assert "leave out --set" in refused.stderr


def test_a_report_of_several_runs_leaves_theirs_as_they_are(tmp_path: Path) -> None:
    for out in ("one", "other"):
        bench("run", "dispatch", "--np", "2", "-B", "in_memory", "--out", out, cwd=tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}

    done = bench("report", "one", "other", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "results: reports/one+other-20" in done.stderr
    assert {path: path.read_bytes() for path in before} == before


def test_under_a_launcher_np_is_refused_and_a_dry_run_has_the_launchers_ranks(tmp_path: Path) -> None:
    ranks = {"PMI_RANK": "0", "PMI_SIZE": "2"}

    refused = bench("run", "dispatch", "--np", "2", "-B", "in_memory", cwd=tmp_path, **ranks)
    shown = bench("run", "dispatch", "--dry-run", cwd=tmp_path, **ranks)

    assert refused.returncode == 2
    assert "leave out --np, or mpirun and srun" in refused.stderr
    assert "ranks=2" in shown.stdout
    assert list(tmp_path.iterdir()) == []


def test_ranks_start_where_the_current_folder_has_been_deleted(scenario: Path, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    program = (
        "import os, sys; os.rmdir(os.getcwd()); os.execv(sys.executable, [sys.executable, '-P', '-m', *sys.argv[1:]])"
    )
    command = ["ncclep_bench.cli", "sweep", scenario, "--backend", "host", "--out", tmp_path / "run"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}

    done = subprocess.run(
        [sys.executable, "-P", "-c", program, *map(str, command)],
        cwd=tmp_path / "gone",
        env=env,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr


def test_resume_refuses_a_run_of_other_cases(scenario: Path, tmp_path: Path) -> None:
    bench("sweep", scenario, "--out", "run", "--format", "csv", cwd=tmp_path)

    done = bench("sweep", scenario, "--set", "tokens=4", "--resume", "run", cwd=tmp_path)

    assert done.returncode == 2
    assert "run holds a run of other cases" in done.stderr
    assert "ncclep-bench sweep" in done.stderr


def test_a_dry_run_lists_cases_with_bytes_and_starts_nothing(scenario: Path, tmp_path: Path) -> None:
    done = bench("sweep", scenario, "--backend", "host", "--dry-run", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == CASES + 2
    assert lines[0].split() == ["payload", "planned", "mem/rank", "memory", "case"]
    assert "collective=dispatch,backend=host" in lines[1]
    assert " B" in lines[1]
    assert lines[-1].startswith(f"{CASES} cases, 0 of them waived")
    assert [path.name for path in tmp_path.iterdir()] == [scenario.name]


def test_run_measures_a_collective_beside_its_partner_over_a_range(tmp_path: Path) -> None:
    arguments = ["-b", "4", "-e", "16", "-f", "2", "--hidden", "16", "--np", "2", "--backend", "in_memory"]

    done = bench("run", "dispatch", *arguments, "--set", "max_samples=10", "--out", "run", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    cases = [record.case for record in read_run(tmp_path / "run").measurements]
    assert [(case.collective, case.tokens) for case in cases] == [
        (name, tokens) for tokens in (4, 8, 16) for name in ("dispatch", "padded_all_to_all")
    ]
    assert "TAG" in done.stdout


def test_run_counts_bytes_of_one_expert_for_parameters(tmp_path: Path) -> None:
    arguments = ["-b", "1K", "-e", "4K", "-f", "4", "--no-partner", "--dtype", "bf16", "--np", "2", "--dry-run"]

    done = bench("run", "all_gather_experts", *arguments, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "expert_elements=512," in done.stdout
    assert "expert_elements=2048," in done.stdout
    assert "dense_all_gather" not in done.stdout


def test_report_renders_a_run_again(scenario: Path, tmp_path: Path) -> None:
    bench("sweep", scenario, "--out", "run", "--format", "csv", cwd=tmp_path)

    done = bench("report", "run", "--out", "again", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == ["report.html", "summary.csv"]
    assert (tmp_path / "again" / "summary.csv").read_text() == (tmp_path / "run" / "summary.csv").read_text()
    assert f"{CASES} passed" in done.stdout
    assert "results: again" in done.stderr


def test_scenarios_are_listed_shown_and_checked(scenario: Path, tmp_path: Path) -> None:
    assert "quick" in bench("scenarios", "list", cwd=tmp_path).stdout
    assert bench("scenarios", "show", scenario, cwd=tmp_path).stdout == SCENARIO
    assert bench("scenarios", "check", scenario, cwd=tmp_path).stdout == f"{scenario}: {CASES} cases\n"


def test_a_file_that_names_no_ranks_does_not_decide_those_of_the_next(scenario: Path, tmp_path: Path) -> None:
    wide = tmp_path / "wide.toml"
    wide.write_text('collective = "dispatch"\nranks = 8\ntokens = 4\nhidden = 8\nnum_experts = 8\ntop_k = 2\n')

    done = bench("scenarios", "check", "quick", wide, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert f"{wide}: 1 cases" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sweep"], ["SCENARIO"]),
        (["sweep", "."], [".: is a folder", "scenarios list"]),
        (["sweep", "small"], ["unknown scenario 'small'", "./small.toml"]),
        (["sweep", "small.toml", "-B", "host,cuda"], ["unknown backend 'host,cuda'", "one at a time"]),
        (["report", "small.toml"], ["small.toml: not the record of a run", "give a run's folder"]),
        (["sweep", "no-such"], ["unknown scenario 'no-such'", "quick"]),
        (["sweep", "quick"], ["names no ranks", "--np"]),
        (["sweep", "quick", "--np", "3"], ["num_experts 8 is not divisible by 3 ranks"]),
        (["sweep", "small.toml", "--np", "1"], ["small.toml: key `ranks`: value 2 exceeds the 1 there are"]),
        (["sweep", "small.toml", "--np", "0"], ["--np"]),
        (["sweep", "small.toml", "--set", "tokens=-1"], ["--set tokens=-1", "tokens", "from 0"]),
        (["sweep", "small.toml", "--set", "toknes=1"], ["toknes", "tokens"]),
        (["sweep", "small.toml", "--filter", "tokens =="], ["--filter 'tokens =='"]),
        (["sweep", "small.toml", "--filter", "tokens == 5"], ["leaves none of 3 cases"]),
        (["sweep", "small.toml", "--backend", "tcp"], ["unknown backend 'tcp'", "in_memory"]),
        (["sweep", "small.toml", "--format", "pdf"], ["unknown report format 'pdf'", "html"]),
        (["sweep", "small.toml", "--out", "small.toml/run"], ["small.toml/run", "choose another --out"]),
        (["sweep", "small.toml", "--out", "/proc/run"], ["/proc/run", "choose another --out"]),
        (
            ["sweep", "small.toml", "--backend", "host", "--launcher", "'mpiexec"],
            ["--launcher 'mpiexec: No closing quot"],
        ),
        (["sweep", "small.toml", "--resume", "nowhere"], ["nowhere: No such file"]),
        (["sweep", "small.toml", "small.toml"], ["two scenarios are called 'small'"]),
        (["run", "dispach", "--np", "2"], ["did you mean 'dispatch'?"]),
        (["run", "dispatch", "-b", "8", "-e", "4", "--np", "2"], ["-b 8 -e 4: not a range of sizes"]),
        (["run", "dispatch", "-b", "many", "--np", "2"], ["not a size in bytes: 'many'"]),
        (["run", "dispatch", "--dtype", "int4", "--np", "2"], ["unknown dtype 'int4'"]),
        (["report", "nowhere"], ["cannot read nowhere"]),
        (["scenarios", "check", "nowhere.toml"], ["nowhere.toml"]),
    ],
    ids=lambda value: " ".join(value) if "sweep" in value or len(value) > 1 else "",
)
def test_wrong_input_ends_with_exit_code_2_and_says_what_is_wrong(
    scenario: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: list[str]
) -> None:
    monkeypatch.chdir(scenario.parent)

    done = CliRunner().invoke(main, arguments)

    assert done.exit_code == 2, done.stderr
    assert [word for word in words if word not in done.stderr] == []
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert [path.name for path in scenario.parent.iterdir()] == [scenario.name]


def test_a_folder_that_holds_a_run_is_not_written_into(scenario: Path, tmp_path: Path) -> None:
    bench("sweep", scenario, "--out", "run", "--format", "csv", cwd=tmp_path)
    before = (tmp_path / "run" / "run.jsonl").read_bytes()

    done = bench("sweep", scenario, "--out", "run", cwd=tmp_path)

    assert done.returncode == 2
    assert "--resume" in done.stderr
    assert (tmp_path / "run" / "run.jsonl").read_bytes() == before


def test_a_missing_launcher_ends_with_exit_code_3_before_the_folder_is_made(scenario: Path, tmp_path: Path) -> None:
    done = bench("sweep", scenario, "--backend", "host", "--launcher", "no-such", "--out", "run", cwd=tmp_path)

    assert done.returncode == 3
    assert "pip install 'ncclep-bench[mpi]'" in done.stderr
    assert not (tmp_path / "run").exists()


def test_ranks_run_what_was_started_not_a_package_in_the_folder_it_was_started_in(
    scenario: Path, tmp_path: Path
) -> None:
    (tmp_path / "ncclep_bench").mkdir()
    (tmp_path / "ncclep_bench" / "__init__.py").write_text("raise ImportError('another package')")

    done = bench("sweep", scenario, "--backend", "host", "--out", "run", cwd=tmp_path)

    assert done.returncode == 0, done.stderr


def test_a_launcher_that_starts_no_ranks_ends_with_exit_code_3(scenario: Path, tmp_path: Path) -> None:
    done = bench("sweep", scenario, "--backend", "host", "--launcher", "false", "--out", "run", cwd=tmp_path)

    assert done.returncode == 3, done.stderr
    assert "the ranks do not start: the ranks ended: exit code 1" in done.stderr


def test_a_sweep_in_which_everything_is_waived_ends_with_exit_code_3(scenario: Path, tmp_path: Path) -> None:
    settings = ["--set", "collective=dispatch_combine", "--set", "dtype=float8_e4m3fn", "--set", "hidden=128"]

    done = bench("sweep", scenario, *settings, "--out", "run", cwd=tmp_path)

    assert done.returncode == 3, done.stderr
    assert "float8_e4m3fn" in done.stdout
    assert {record.outcome for record in read_run(tmp_path / "run").measurements} == {"waived"}


def test_sweeps_of_the_same_second_get_folders_of_their_own(scenario: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(scenario.parent)
    plan = plan_sweep([load_scenario("small.toml")])

    folders = [default_directory(plan) for _ in range(3)]

    assert len(set(folders)) == 3
    assert all(folder.is_dir() and folder.name.startswith("small-20") for folder in folders)


def test_a_name_that_is_no_text_is_refused_before_anything_runs(scenario: Path, tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.toml"))
    odd.write_text(SCENARIO)

    done = bench("sweep", odd, "--out", "run", cwd=tmp_path)

    assert done.returncode == 2, done.stderr
    assert r"caf\udce9: not UTF-8 text" in done.stderr
    assert not (tmp_path / "run").exists()


def test_names_and_texts_of_files_cannot_drive_the_terminal(tmp_path: Path) -> None:
    odd = tmp_path / "esc\x1b[31m\x07.toml"
    odd.write_text(SCENARIO.replace("two collectives", r"two \u001b[31mcollectives"))

    outputs = [
        bench(*arguments, cwd=tmp_path)
        for arguments in (
            ("sweep", odd, "--out", "run\x1b[2J"),
            ("sweep", odd, "--dry-run"),
            ("sweep", odd, "--out", "run\x1b[2J"),
            ("report", "run\x1b[2J"),
            ("scenarios", "check", odd),
        )
    ]

    assert [done.returncode for done in outputs] == [0, 0, 2, 0, 0]
    assert [done.args for done in outputs if set("\x1b\x07") & set(done.stdout + done.stderr)] == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_an_output_that_takes_nothing_more_is_no_internal_error(scenario: Path, tmp_path: Path) -> None:
    bench("sweep", scenario, "--out", "run", "--format", "csv", cwd=tmp_path)
    command = f"{sys.executable} -m ncclep_bench.cli report run"

    full = subprocess.run(f"{command} > /dev/full", shell=True, cwd=tmp_path, capture_output=True, text=True)
    closed = subprocess.run(f"{command} >&-", shell=True, cwd=tmp_path, capture_output=True, text=True)

    assert (full.returncode, full.stderr) == (2, "error: standard output: No space left on device\n")
    assert (closed.returncode, closed.stderr) == (0, "results: run\n")


def test_a_report_that_cannot_be_written_leaves_the_one_before(scenario: Path, tmp_path: Path) -> None:
    bench("sweep", scenario, "--out", "run", "--format", "html", cwd=tmp_path)
    page = tmp_path / "run" / "report.html"
    before = page.read_bytes()
    command = f"ulimit -f 100; {sys.executable} -m ncclep_bench.cli report run --format html"

    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)

    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "error: cannot write run/report.html: File too large")
    assert page.read_bytes() == before
    assert sorted(path.name for path in page.parent.iterdir()) == ["report.html", "run.jsonl"]
