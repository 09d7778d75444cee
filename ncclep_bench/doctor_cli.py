"""`ncclep-doctor`: what is wrong with the machine, the job or the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ncclep_bench.errors import BenchError, CannotRunError, InputError
from ncclep_bench.registry import FINDING_FORMATS

if TYPE_CHECKING:
    from ncclep_bench.doctor.contract import Finding
    from ncclep_bench.doctor.recorded import Recorded

HELP_OPTIONS = ["-h", "--help"]


class Doctor(click.Group):
    """A group whose default command is `check`, and whose errors are two lines and an exit code."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in (*HELP_OPTIONS, "--version")):
            args = ["check", *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BenchError as error:
            _leave_as_the_format_says(ctx, str(error))
            _complain(str(error))
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            ctx.exit(130)
        except (click.exceptions.Exit, click.ClickException, click.Abort, BrokenPipeError):
            raise
        except OSError as error:
            _complain(f"{error.filename or 'standard output'}: {error.strerror or error}")
            ctx.exit(_own_exit_code(ctx, InputError.exit_code))
        except Exception as error:
            import traceback

            _complain(
                f"internal error: {type(error).__name__}: {error}\n{traceback.format_exc()}".replace("\n", "\n  ")
            )
            ctx.exit(_own_exit_code(ctx, CannotRunError.exit_code))


@click.group(cls=Doctor, context_settings={"help_option_names": HELP_OPTIONS, "max_content_width": 100})
@click.version_option(package_name="ncclep-bench", prog_name="ncclep-doctor")
def main() -> None:
    """Find what is wrong with the machine, the job or the configuration of expert-parallel communication.

    Without a command: check. Exit codes: 0 no finding at or over --fail-on, 1 at least one, 2 wrong usage or input,
    3 no check could run; with --format nagios 0 ok, 1 warning, 2 critical, 3 unknown.
    """


_DAY_S = 86400.0


class Seconds(click.FloatRange):
    """A range of numbers, of which "nan" is none: it is neither over nor under a limit."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return number


_config = click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="EPCONFIG.toml",
    help="The EpConfig to judge; %r in its name is the rank.",
)
_ranks = click.option(
    "--ranks",
    type=click.IntRange(1, 65536),
    metavar="N",
    help="Ranks of the group; default: what the launcher says.",
)
_FORMAT = "ncclep_bench.format"


def _remembered(ctx: click.Context, _: click.Parameter, name: str) -> str:
    ctx.meta[_FORMAT] = name
    return name


_format = click.option(
    "--format",
    "format_",
    type=click.Choice(list(FINDING_FORMATS)),
    default="console",
    show_default=True,
    is_eager=True,
    callback=_remembered,
    help="nagios has exit codes of its own: 0 ok, 1 warning, 2 critical, 3 unknown.",
)
_VERBOSE = "ncclep_bench.verbose"


def _said_in_full(ctx: click.Context, _: click.Parameter, verbose: bool) -> None:
    ctx.meta[_VERBOSE] = verbose


_verbose = click.option(
    "-v",
    "--verbose",
    is_flag=True,
    expose_value=False,
    callback=_said_in_full,
    help="On the console, also the code of every check that did not run, by reason.",
)
_fail_on = click.option(
    "--fail-on",
    type=click.Choice(["warning", "error"]),
    default="error",
    show_default=True,
    help="The mildest verdict that makes the exit code 1.",
)
_output = click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write there instead of standard output."
)


_anonymise = click.option(
    "--anonymise",
    is_flag=True,
    help="Neutral names for hosts, users, addresses, GUIDs, UUIDs and serial numbers.",
)
_recorded = click.option(
    "--from",
    "recorded",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="PATH...",
    help="Facts documents, captured root folders, raw output and logs, - for standard input; nothing of this machine.",
)
_more = click.argument("more", type=click.Path(path_type=Path), nargs=-1, metavar="")
_select = click.option("--select", multiple=True, metavar="PREFIX", help="Only those whose code starts so; repeatable.")
_ignore = click.option("--ignore", multiple=True, metavar="PREFIX", help="None whose code starts so; repeatable.")


def _read(
    recorded: tuple[Path, ...], more: tuple[Path, ...], config: Path | None = None, ranks: int | None = None
) -> Recorded:
    """What was recorded, else the facts of this machine."""
    from ncclep_bench.doctor.collect import Machine, collect
    from ncclep_bench.doctor.recorded import Recorded, read_recorded

    if recorded:
        return read_recorded([*recorded, *more], config=config, ranks=ranks)
    if more:
        raise click.UsageError(f"unexpected argument {more[0]}: recorded files come after --from")
    return Recorded([collect(Machine(config=config, ranks=ranks))], [])


@main.command()
@_config
@_ranks
@_recorded
@click.option("--np", "processes", type=click.IntRange(1, 65536), metavar="N", help="Start N ranks and compare them.")
@click.option("--launcher", metavar="CMD", help="What starts them.  [mpiexec]")
@click.option(
    "--deadline",
    "deadline_s",
    type=Seconds(1.0, _DAY_S),
    default=30.0,
    show_default=True,
    metavar="S",
    help="Ranks that have not answered by then are named, and the report is made without them.",
)
@_more
@_format
@_select
@_ignore
@_fail_on
@_verbose
@_output
@_anonymise
def check(
    config: Path | None,
    ranks: int | None,
    recorded: tuple[Path, ...],
    processes: int | None,
    launcher: str | None,
    deadline_s: float,
    more: tuple[Path, ...],
    format_: str,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    fail_on: str,
    output: Path | None,
    anonymise: bool,
) -> None:
    """Check machine, environment and configuration.

    Under mpirun or srun, and with --np: of every rank, and whether they agree. With --from: what was recorded
    elsewhere, recognised by its content. What did not run was not looked at, and may be healthy or not.
    """
    from ncclep_bench.doctor.compare import judged
    from ncclep_bench.doctor.recorded import Recorded
    from ncclep_bench.doctor.run import chosen_checks
    from ncclep_bench.runtime.world import environment_sizes, in_mpi_environment

    if processes is not None and recorded:
        raise click.UsageError("--np starts ranks, --from reads what was recorded: give one of them")
    if processes is not None and ranks is not None:
        raise click.UsageError("--np starts as many ranks as the group has: leave out --ranks")
    if launcher is not None and processes is None:
        raise click.UsageError("--launcher starts ranks: say how many with --np")
    checks = chosen_checks(select, ignore)
    group = None
    if recorded or more:
        read = _read(recorded, more, config, ranks)
    elif processes is not None:
        from ncclep_bench.doctor.started_ranks import documents_of_started_ranks

        documents = documents_of_started_ranks(processes, launcher=launcher, config=config, deadline_s=deadline_s)
        read = Recorded(documents, [])
    elif in_mpi_environment() and (environment_sizes()[0] or 1) > 1:
        from ncclep_bench.doctor.ranks import RankGroup

        group = RankGroup(config, ranks, deadline_s)
        gathered = group.documents()
        if gathered is None:
            click.get_current_context().exit(group.follow())
        read = Recorded(gathered, [])
    else:
        read = _read((), (), config, ranks)
    if anonymise:
        read = _without_details(read)
    code = 1
    try:
        _report(judged(checks, read.documents), read, format_, fail_on, output)
        code = 0
    except (click.exceptions.Exit, BenchError) as left:
        code = left.exit_code
        raise
    finally:
        if group is not None:
            group.finish(code)


@main.command()
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True)
@_format
@_fail_on
@_verbose
@_output
@_anonymise
def logs(files: tuple[Path, ...], format_: str, fail_on: str, output: Path | None, anonymise: bool) -> None:
    """Find the earliest cause in logs of a job and of the kernel.

    NCCL, NCCL EP, DeepEP, NVSHMEM, torch and kernel logs of one or many ranks, of any length; - is standard input.
    """
    from ncclep_bench.doctor.diagnosis import causes_first
    from ncclep_bench.doctor.recorded import read_logs

    read = read_logs(files)
    if anonymise:
        read = _without_details(read)
    _report(causes_first(read.documents[0]), read, format_, fail_on, output, worst_first=False)


@main.command()
@click.option("--pid", "pids", type=int, multiple=True, metavar="PID", help="Launcher or rank of the job; repeatable.")
@_ranks
@click.option("--ras", metavar="HOST:PORT", help="NCCL's RAS; default: NCCL_RAS_ADDR, or localhost:28028.")
@click.option(
    "--log",
    "logs_",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="Logs of the job; repeatable.",
)
@click.option(
    "--wait",
    "wait_s",
    type=Seconds(0.2, 600),
    default=5.0,
    show_default=True,
    metavar="S",
    help="Seconds between two looks.",
)
@_format
@_fail_on
@_verbose
@_output
@_anonymise
def hang(
    pids: tuple[int, ...],
    ranks: int | None,
    ras: str | None,
    logs_: tuple[Path, ...],
    wait_s: float,
    format_: str,
    fail_on: str,
    output: Path | None,
    anonymise: bool,
) -> None:
    """Say which rank holds up a job that stands still, since when, and why.

    Looks twice, and touches nothing: ranks' processes on this machine, Python stacks (py-spy), NCCL's RAS, logs, GPUs.
    """
    from ncclep_bench.doctor.hang import Question, look, questions
    from ncclep_bench.doctor.run import run_checks

    read = look(Question(pids, ranks, ras, logs_, wait_s))
    if anonymise:
        read = _without_details(read)
    _report(run_checks(questions(bool(logs_)), read.documents[0]), read, format_, fail_on, output)


@main.group()
def baseline() -> None:
    """Learn healthy machines, and say what has drifted from them."""


@baseline.command()
@click.argument("file", type=click.Path(path_type=Path))
@_recorded
@_more
@_anonymise
def save(file: Path, recorded: tuple[Path, ...], more: tuple[Path, ...], anonymise: bool) -> None:
    """Save facts of healthy machines as the baseline FILE.

    Of this machine, or of a fleet: save FILE --from PATH... An older baseline is replaced, another file never.
    """
    from ncclep_bench.doctor.baseline import Baseline, read_baseline

    if file.exists():
        read_baseline(file)
    read = _read(recorded, more)
    if anonymise:
        read = _without_details(read)
    _write(Baseline(machines=read.documents).to_json().decode(), file)
    count = len(read.documents)
    click.echo(f"ncclep-doctor: {file}: a baseline of {count} machine{'s' * (count > 1)}", err=True)


@baseline.command()
@click.argument("file", type=click.Path(path_type=Path))
@_recorded
@_more
@_format
@_fail_on
@_verbose
@_output
def compare(
    file: Path,
    recorded: tuple[Path, ...],
    more: tuple[Path, ...],
    format_: str,
    fail_on: str,
    output: Path | None,
) -> None:
    """Report what has drifted from the baseline FILE.

    Each machine is held against its own past if the baseline has it, else against all machines of the baseline.
    """
    from ncclep_bench.doctor.baseline import drift, read_baseline
    from ncclep_bench.doctor.checks.drift import CHECKS
    from ncclep_bench.doctor.run import run_checks

    healthy = read_baseline(file)
    read = _read(recorded, more)
    findings = [finding for facts in read.documents for finding in run_checks(CHECKS, drift(healthy, facts))]
    _report(findings, read, format_, fail_on, output)


def _report(
    findings: list[Finding],
    read: Recorded,
    format_: str,
    fail_on: str,
    output: Path | None,
    *,
    worst_first: bool = True,
) -> None:
    """Write the findings, say which files meant nothing, and leave with the exit code: 3 where no check could run."""
    from typing import cast

    from ncclep_bench.doctor.contract import LEVELS, Verdict
    from ncclep_bench.doctor.run import worst
    from ncclep_bench.reporting.findings.contract import Diagnosis, FindingFormat

    chosen: FindingFormat = FINDING_FORMATS.get(format_)
    diagnosis = Diagnosis(
        findings,
        host=read.documents[0].host if len(read.documents) == 1 else "",
        fail_on=cast(Verdict, fail_on),
        worst_first=worst_first,
        colour=_colour(output),
        verbose=click.get_current_context().meta.get(_VERBOSE, False),
    )
    _write(chosen.render(diagnosis), output)
    for file in read.unknown:
        _complain(f"{file}: nothing in it is known")
    if (code := chosen.exit_code(findings)) is not None:
        click.get_current_context().exit(code)
    if worst(findings, [level for level in LEVELS if level in ("error", fail_on)]):
        click.get_current_context().exit(1)
    if findings and all(finding.verdict == "not_run" for finding in findings):
        click.get_current_context().exit(CannotRunError.exit_code)


def _complain(message: str) -> None:
    """A message and its indented lines on standard error, which nobody may be able to read."""
    from ncclep_bench.model.toml_file import shown

    for line in message.splitlines():
        _tell(shown(line) if line.startswith(" ") else f"ncclep-doctor: {shown(line)}")


def _tell(line: str) -> None:
    """A line on standard error; where that is full or closed, the result still matters."""
    import contextlib

    with contextlib.suppress(OSError):
        click.echo(line, err=True)


def _own_exit_code(ctx: click.Context, code: int) -> int:
    """The format's code for knowing nothing, where it has its own codes, else `code`."""
    own: int | None = FINDING_FORMATS.get(ctx.meta.get(_FORMAT, "console")).exit_code(())
    return code if own is None else own


def _leave_as_the_format_says(ctx: click.Context, failure: str) -> None:
    """Where a format has its own exit codes, its readers look for the reason on standard output."""
    from ncclep_bench.reporting.findings.contract import Diagnosis, FindingFormat

    chosen: FindingFormat = FINDING_FORMATS.get(ctx.meta.get(_FORMAT, "console"))
    if (code := chosen.exit_code(())) is not None:
        click.echo(chosen.render(Diagnosis((), failure=failure)), nl=False)
        ctx.exit(code)


def _without_details(read: Recorded) -> Recorded:
    """The same facts, with one neutral name for each personal detail."""
    from ncclep_bench.doctor.anonymise import anonymised, anonymous

    knows = anonymous()
    return read._replace(
        documents=anonymised(read.documents, knows), unknown=[knows.text(file) for file in read.unknown]
    )


@main.command()
@_config
@_ranks
@_output
@_anonymise
def collect(config: Path | None, ranks: int | None, output: Path | None, anonymise: bool) -> None:
    """Read the machine into a facts document (JSON).

    In a job each rank writes its own: `%r` in FILE is the rank.
    """
    from ncclep_bench.doctor.answers import of_rank
    from ncclep_bench.doctor.collect import Machine
    from ncclep_bench.doctor.collect import collect as collect_facts
    from ncclep_bench.doctor.recorded import Recorded

    read = Recorded([collect_facts(Machine(config=of_rank(config), ranks=ranks))], [])
    if anonymise:
        read = _without_details(read)
    _write(read.documents[0].to_json().decode(), of_rank(output))


@main.command()
@click.option(
    "--np",
    "ranks",
    type=click.IntRange(2, 4096),
    metavar="N",
    help="Start N ranks here; default: 2, or the launcher's.",
)
@click.option("--backend", type=click.Choice(["host", "cuda"]), default="host", show_default=True)
@_select
@_ignore
@click.option(
    "--deadline",
    "deadline_s",
    type=Seconds(0, _DAY_S, min_open=True),
    metavar="S",
    help="Seconds for each self-test; default: its own.",
)
@click.option("--inject", metavar="FAULT", help="Run without and with a planted fault: exit code 1 if caught, else 3.")
@click.option("--list", "list_", is_flag=True, help="List self-tests and faults, and run nothing.")
@_format
@_fail_on
@_verbose
@_output
def selftest(
    ranks: int | None,
    backend: str,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    deadline_s: float | None,
    inject: str | None,
    list_: bool,
    format_: str,
    fail_on: str,
    output: Path | None,
) -> None:
    """Try out with real ranks what a job needs.

    Payloads, leaks, graphs, dtypes, streams, counts, bandwidth, hangs; each within a deadline, and each says what it
    moved. In ranks of its own, or in those of mpirun and srun.
    """
    import os

    from ncclep_bench.doctor.selftests.command import listing, run

    if list_:
        _write(listing(), output)
        return
    done = run(ranks, backend, select, ignore, deadline_s, inject, _tell)
    code = 0
    try:
        _report(done.findings, done.read, format_, fail_on, output if done.speaks else Path(os.devnull))
    except click.exceptions.Exit as left:
        code = left.exit_code
    code = code if done.exit_code is None else done.exit_code
    done.leave(code)
    click.get_current_context().exit(code)


@main.command()
@click.option("--select", multiple=True, metavar="PREFIX", help="Only those whose code starts so; repeatable.")
@click.option("--ignore", multiple=True, metavar="PREFIX", help="None whose code starts so; repeatable.")
def rules(select: tuple[str, ...], ignore: tuple[str, ...]) -> None:
    """List every check and self-test: code, severity, and what holds where all is well."""
    from ncclep_bench.doctor.render import rules_as_console
    from ncclep_bench.doctor.run import all_rules, chosen

    _write(rules_as_console(chosen(all_rules(), select, ignore, "rule"), colour=_colour(None)), None)


@main.command()
@click.argument("code")
def explain(code: str) -> None:
    """Say why a check matters and what to do.

    Also how to see it by hand, what it needs to know, and its source.
    """
    from ncclep_bench.doctor.render import explanation
    from ncclep_bench.doctor.run import rule_named

    _write(explanation(rule_named(code), colour=_colour(None)), None)


def _colour(output: Path | None) -> bool:
    """Colour only on a terminal, and not where NO_COLOR is set."""
    import os
    import sys

    return output is None and sys.stdout is not None and sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _write(text: str, output: Path | None) -> None:
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"{output}: cannot be written: {error.strerror}", hint="give a file in a folder you can write to"
        ) from error


if __name__ == "__main__":
    main()
