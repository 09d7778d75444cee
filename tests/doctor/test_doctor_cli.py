"""The command line: what it prints, where, and how it leaves."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ncclep_bench.doctor.run import all_checks, all_rules
from ncclep_bench.doctor_cli import main
from ncclep_bench.model.facts import facts_from_json

GOOD = 'num_experts = 64\ntop_k = 8\nhidden = 7168\ndtype = "bfloat16"\n'


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("NCCL_", "PMI_", "OMPI_", "CUDA_", "UCX_")):
            monkeypatch.delenv(name)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "ep.toml"
    path.write_text(GOOD)
    return path


def doctor(*arguments: object, **env: str) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], env=env, prog_name="ncclep-doctor")


def test_without_a_command_it_checks():
    assert doctor("--select", "NCCL001").output == doctor("check", "--select", "NCCL001").output == "1 ok\n"


def test_a_problem_is_one_line_with_its_evidence_and_a_remedy_to_paste():
    done = doctor("--select", "NCCL001", "--select", "NCCL003", NCCL_IB_DISABLE="1")

    assert done.output.splitlines() == [
        "! NCCL001  InfiniBand and RoCE are switched off: nodes talk over TCP sockets",
        "      NCCL_IB_DISABLE=1 (environment)",
        "      → unset NCCL_IB_DISABLE",
        "1 ok, 1 warning",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "--np", "2", "--from", "facts.json"], "give one of them"),
        (["check", "--np", "2", "--ranks", "2"], "leave out --ranks"),
        (["check", "--launcher", "mpiexec"], "say how many with --np"),
        (["check", "facts.json"], "recorded files come after --from"),
        (["baseline", "save", "healthy.json", "facts.json"], "recorded files come after --from"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(arguments: list[str], said: str):
    done = doctor(*arguments)

    assert done.exit_code == 2
    assert said in done.output


@pytest.mark.parametrize(
    ("env", "fail_on", "code"),
    [
        ({}, "warning", 0),
        ({"NCCL_DEBUG": "INFO"}, "warning", 0),
        ({"NCCL_IB_DISABLE": "1"}, "error", 0),
        ({"NCCL_IB_DISABLE": "1"}, "warning", 1),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "NVL"}, "error", 1),
    ],
)
def test_the_exit_code_says_whether_something_is_at_or_over_the_limit(env: dict[str, str], fail_on: str, code: int):
    assert doctor("check", "--select", "NCCL", "--fail-on", fail_on, **env).exit_code == code


def test_json_is_one_object_with_every_finding(config: Path):
    done = doctor("check", "--config", config, "--ranks", 7, "--format", "json", PMI_RANK="2")
    document = json.loads(done.output)

    assert done.exit_code == 1
    assert {finding["code"] for finding in document["findings"]} == {check.code for check in all_checks()}
    assert sum(document["counts"].values()) == len(document["findings"])
    (placement,) = [finding for finding in document["findings"] if finding["code"] == "EP002"]
    assert set(placement) == {"code", "verdict", "title", "summary", "evidence", "remedy", "rank", "host"}
    assert placement["verdict"] == "error"
    assert placement["rank"] == 2
    assert f"{config}: num_experts = 64" in placement["evidence"]


@pytest.mark.parametrize(
    ("env", "code", "word"),
    [
        ({}, 0, "OK"),
        ({"NCCL_IB_DISABLE": "1"}, 1, "WARNING"),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "NVL"}, 2, "CRITICAL"),
    ],
)
def test_nagios_has_exit_codes_of_its_own(env: dict[str, str], code: int, word: str):
    done = doctor("--select", "NCCL00", "--format", "nagios", **env)

    assert done.exit_code == code
    assert re.fullmatch(rf"NCCLEP {word} - [^|\n]*\| errors=\d.*\n", done.output)


def test_nagios_says_on_standard_output_why_it_knows_nothing(tmp_path: Path):
    (tmp_path / "empty.txt").write_text("nothing of interest\n")

    for arguments in (["--config", "/no/such/file.toml"], ["--select", "XYZ"], ["--from", tmp_path / "empty.txt"]):
        done = doctor("check", "--format", "nagios", *arguments)
        assert done.exit_code == 3
        assert done.stdout.startswith("NCCLEP UNKNOWN - ")
        assert done.stdout.count("\n") == 1
    assert doctor("check", "--select", "XYZ").exit_code == 2


@pytest.mark.parametrize("name", ["junit", "markdown", "html", "github"])
def test_every_other_format_leaves_with_the_usual_exit_code(name: str, tmp_path: Path):
    file = tmp_path / "findings"
    env = {"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "NVL"}

    assert doctor("--select", "NCCL00", "--format", name, "-o", file, **env).exit_code == 1
    assert "NCCL006" in file.read_text(encoding="utf-8")
    assert doctor("--select", "NCCL00", "--format", name).exit_code == 0


def test_checks_that_could_not_run_share_a_line_per_reason():
    arguments = ("--select", "EP101", "--select", "EP102")

    assert doctor(*arguments).output.splitlines() == [
        "- 2 not run: no configuration given: --config EPCONFIG.toml",
        "0 ok, 2 not run",
    ]
    assert doctor(*arguments, "-v").output.splitlines() == [
        "- 2 not run: no configuration given: --config EPCONFIG.toml  (EP101, EP102)",
        "0 ok, 2 not run",
    ]


def test_the_report_of_a_machine_fits_a_screen_and_names_the_command_that_tells_more():
    output = doctor("check").output

    assert len(re.findall("^- ", output, flags=re.MULTILINE)) <= 6
    assert max(len(line) for line in output.splitlines() if line.startswith("- ")) <= 120
    assert "ncclep-doctor logs FILE..." in output


def test_it_leaves_with_three_where_no_check_could_run():
    for format_ in ("console", "json", "junit", "nagios"):
        assert doctor("--select", "EP101", "--format", format_).exit_code == 3, format_
    assert doctor("--select", "EP101", "--select", "NCCL001").exit_code == 0


def test_findings_in_logs_can_be_shown_to_others(tmp_path: Path):
    log = tmp_path / "job.log"
    log.write_text(
        "gpunode7:12:15 [0] transport/net_ib.cc:12 NCCL WARN NET/IB: Got completion from peer 10.1.2.3<4444> "
        "with status=12 opcode=0 len=0 vendor err 129\n"
    )

    assert "gpunode7" in doctor("logs", log).output
    done = doctor("logs", log, "--anonymise")
    assert done.exit_code == 1
    assert not re.search(r"gpunode7|10\.1\.2\.3", done.output)


def test_the_list_of_rules_can_be_cut_to_a_family():
    lines = doctor("rules", "--select", "GPU", "--ignore", "GPU2").output.splitlines()

    assert lines
    assert all(line.startswith("GPU0") for line in lines)
    assert doctor("rules", "--select", "XYZ").exit_code == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num_experts = \n", "not valid TOML: .*line 1"),
        ("num_expert = 8\n", "key `num_expert`: unknown key.*did you mean `num_experts`"),
        ("num_experts = 8\ntop_k = -2\n", "key `top_k`: value -2 is not usable; allowed: a whole number from 1"),
        ("num_experts = 8\nmode = 'fast'\n", "key `mode`: value 'fast' is not usable; allowed: 'ht', 'll'"),
        ("top_k = 2\n", "key `num_experts`: is required"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_wrong_input(text: str, said: str, tmp_path: Path):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    done = doctor("--config", path)

    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"ncclep-doctor: {path}: ")
    assert len(done.stderr.splitlines()) <= 2
    assert re.search(said, done.stderr)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config", "/no/such/file.toml"],
        ["--config", "/"],
        ["--ranks", "0"],
        ["--ranks", "many"],
        ["--select", "XYZ"],
        ["--ignore", "XYZ"],
        ["--ignore", ""],
        ["--select", "EP001", "--ignore", "EP001"],
        ["--np", "2", "--deadline", "nan"],
        ["--np", "2", "--deadline", "1e300"],
        ["selftest", "--deadline", "nan"],
        ["hang", "--wait", "nan"],
        ["--format", "pdf"],
        ["--fail-on", "never"],
        ["explain", "EP999"],
        ["explain"],
        ["no-such-command"],
        ["--no-such-option"],
        ["-o", "/no/such/folder/findings.txt"],
        ["collect", "-o", "/no/such/folder/facts.json"],
    ],
)
def test_wrong_usage_leaves_with_two_and_a_short_message(arguments: list[str]):
    done = doctor(*arguments)

    assert (done.exit_code, done.stdout) == (2, "")
    assert 1 <= len(done.stderr.splitlines()) <= 4
    assert "Traceback" not in done.stderr


def test_where_nothing_could_be_looked_at_nothing_could_run(tmp_path: Path):
    for arguments in (["--from", tmp_path], ["--select", "EP101"], ["selftest", "--select", "SELF003"]):
        done = doctor(*arguments)
        assert done.exit_code == 3
        assert "0 ok" in done.output


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["check", "--select", "NCCL001"], 2),
        (["check", "--select", "NCCL001", "--format", "nagios"], 3),
        (["rules"], 2),
    ],
)
def test_an_output_that_is_full_is_one_line_and_wrong_output(arguments: list[str], code: int):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ncclep_bench.doctor_cli", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )

    assert done.returncode == code
    assert done.stderr == b"ncclep-doctor: standard output: No space left on device\n"


def test_messages_that_nobody_can_read_do_not_change_the_result(tmp_path: Path):
    (tmp_path / "unknown.txt").write_text("nothing of interest\n")
    (tmp_path / "facts.json").write_text(doctor("collect").output)
    command = [sys.executable, "-m", "ncclep_bench.doctor_cli", "--from", str(tmp_path)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, check=False)

    assert done.returncode == 0
    assert b" ok" in done.stdout


def test_a_closed_output_is_no_error():
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "ncclep_bench.doctor_cli", "--select", "NCCL001"],
        stderr=subprocess.PIPE,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, b"")


def test_an_error_of_the_doctor_itself_is_no_finding(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise KeyError("broken")

    monkeypatch.setattr("ncclep_bench.doctor.compare.judged", broken)
    done = doctor("check")

    assert done.exit_code == 3
    assert done.stderr.startswith("ncclep-doctor: internal error: KeyError: 'broken'\n")


@pytest.mark.parametrize("variable", ["NCCL_CONF_FILE", "NCCL_TOPO_FILE"])
def test_a_pipe_that_a_variable_names_is_not_waited_for(variable: str, tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    command = [sys.executable, "-m", "ncclep_bench.doctor_cli", "--select", "NCCL001"]
    done = subprocess.run(command, env={**os.environ, variable: str(tmp_path / "pipe")}, check=False, timeout=240)

    assert done.returncode == 0


def test_control_characters_of_a_variable_do_not_reach_the_terminal():
    done = doctor("--select", "NCCL009", NCCL_DEBGU="\x1b[2Jboo")

    assert "\\x1b[2Jboo" in done.output
    assert "\x1b" not in done.output


def test_findings_can_go_to_a_file(tmp_path: Path):
    file = tmp_path / "findings.json"
    done = doctor("--select", "NCCL", "--format", "json", "-o", file)

    assert (done.exit_code, done.output) == (0, "")
    assert json.loads(file.read_text())["findings"]


def test_collect_writes_a_facts_document(config: Path, tmp_path: Path):
    file = tmp_path / "facts.json"
    done = doctor("collect", "--config", config, "--ranks", 4, "-o", file)
    facts = facts_from_json(file.read_bytes(), file=str(file))

    assert (done.exit_code, done.output) == (0, "")
    assert facts.read("ep.config", dict)["num_experts"] == 64
    assert facts.fact("ep.config").source == str(config)
    assert facts.read("ep.ranks", int) == 4


def test_rules_lists_every_check_and_self_test():
    lines = doctor("rules").output.splitlines()

    assert [line.split()[0] for line in lines] == [rule.code for rule in all_rules()]


@pytest.mark.parametrize("check", [pytest.param(rule, id=rule.code) for rule in all_rules()])
def test_explain_says_why_what_to_do_and_where_it_is_from(check):
    done = doctor("explain", check.code.lower())

    assert done.exit_code == 0
    for part in (check.code, check.title, check.severity, check.why, check.by_hand, check.reference):
        assert part in done.output
    for line in check.remedy.splitlines():
        assert line in done.output


def on_a_terminal(*arguments: str, **env: str) -> bytes:
    ours, theirs = pty.openpty()
    code = "from ncclep_bench.doctor_cli import main; main()"
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    subprocess.run(
        [sys.executable, "-c", code, *arguments], stdout=theirs, env={**clean, "TERM": "xterm", **env}, check=False
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    return shown


def test_colour_is_for_terminals_and_no_color_is_obeyed():
    arguments = ("--select", "NCCL001")

    assert b"\x1b[" in on_a_terminal(*arguments, NCCL_IB_DISABLE="1")
    assert b"\x1b[" not in on_a_terminal(*arguments, NCCL_IB_DISABLE="1", NO_COLOR="1")
    assert b"InfiniBand" in on_a_terminal(*arguments, NCCL_IB_DISABLE="1", NO_COLOR="1")
    assert "\x1b[" not in doctor(*arguments, NCCL_IB_DISABLE="1").output
