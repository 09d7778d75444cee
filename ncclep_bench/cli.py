"""The command line `ncclep-bench`: parse, one call, render, exit code; heavy imports are inside commands."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import click
from click.core import ParameterSource

from ncclep_bench.errors import BenchError, InputError
from ncclep_bench.registry import BACKENDS, COLLECTIVES, FORMATS

if TYPE_CHECKING:
    from ncclep_bench.model.anonymous import Anonymous
    from ncclep_bench.model.measurement import Preflight
    from ncclep_bench.model.scenario import Scenario
    from ncclep_bench.reporting.contract import Format
    from ncclep_bench.results.frames import RunFrames
    from ncclep_bench.sweeps.run import Plan

_DEFAULT_FORMATS = ("console", "csv", "html")


def _own_exit_codes(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with errors as message, hint and exit code; a traceback goes to a file."""

    @wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except BenchError as error:
            _complain_once(str(error))
            sys.exit(error.exit_code)
        except KeyboardInterrupt as interrupt:
            kept = "what was measured is kept"
            for folder in interrupt.args:
                kept += f" in {folder}\n  go on with ncclep-bench sweep --resume {shlex.quote(folder)}"
            _complain(f"interrupted; {kept}")
            _leave(130)
        except (click.exceptions.Exit, click.ClickException, click.Abort, BrokenPipeError):
            raise
        except OSError as error:
            _complain(f"{error.filename or 'standard output'}: {error.strerror or error}")
            _leave(InputError.exit_code)
        except Exception as error:
            if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
                _complain(f"{error.object}: not UTF-8 text\n  rename it, or work in a UTF-8 locale")
                _leave(InputError.exit_code)
            _complain(f"internal error: {type(error).__name__}: {error}\n  the traceback is in {_traceback_file()}")
            _leave(1)

    return guarded


def _leave(code: int) -> NoReturn:
    """Exit; under a launcher with all ranks, since the others may wait for one that has met an error alone."""
    from ncclep_bench.runtime.world import abort, in_mpi_environment

    if in_mpi_environment():
        abort(code)
    sys.exit(code)


def _complain_once(message: str) -> None:
    """Complain, but under a launcher on the first of its ranks alone."""
    from ncclep_bench.runtime.world import environment_rank

    if not environment_rank():
        _complain(message)


def _complain(message: str) -> None:
    click.echo(f"error: {_printable(message)}", err=True)


def _printable(text: str) -> str:
    """`text`, which has names from files in it, without what would drive a terminal."""
    from ncclep_bench.model.toml_file import shown

    return "\n".join(map(shown, text.split("\n")))


def _traceback_file() -> str:
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="ncclep-bench-", suffix=".traceback", delete=False) as file:
        traceback.print_exc(file=file)
    return file.name


def _ranks_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options of every command that measures."""
    for option in reversed(
        [
            click.option(
                "--np",
                "ranks",
                type=click.IntRange(1, 65536),
                help="Ranks to start. By default the most the scenario asks for; under mpirun or srun the launcher's.",
            ),
            click.option("--launcher", metavar="CMD", help='Starts the ranks, as in "mpiexec" or "srun --mpi=pmix".'),
            click.option("-B", "--backend", "backends", multiple=True, help=f"Of {', '.join(BACKENDS)}; repeatable."),
            click.option(
                "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Replace an axis or timing key."
            ),
            click.option("--filter", "expression", metavar="EXPR", help="Keep cases, as in: tokens >= 64."),
            click.option("--dry-run", is_flag=True, help="List cases with bytes and memory; start nothing."),
            click.option("--out", type=click.Path(path_type=Path), help="Folder of the run.  [reports/SCENARIO-TIME]"),
            click.option(
                "--resume",
                type=click.Path(path_type=Path),
                help="Go on in the folder of a run: the same line without --out.",
            ),
            click.option("--format", "formats", multiple=True, help=f"Of {', '.join(FORMATS)}; may be repeated."),
            click.option("--repeats", type=click.IntRange(1, 1000), default=1, help="Measure in N sets of processes."),
            click.option("--deadline", type=click.FloatRange(0, min_open=True), help="Seconds a case may take.  [60]"),
        ]
    ):
        command = option(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="ncclep-bench")
def main() -> None:
    """Measure, verify and explain expert-parallel communication of Mixture-of-Experts models."""


@main.command()
@click.argument("scenarios", nargs=-1, metavar="SCENARIO...")
@_ranks_options
@click.option("--no-preflight", is_flag=True, help="Leave out the doctor's checks before the first case.")
@click.option("--anonymise", is_flag=True, help="At the end replace hosts, users and addresses in the run's record.")
@_own_exit_codes
def sweep(
    scenarios: tuple[str, ...],
    settings: tuple[str, ...],
    deadline: float | None,
    resume: Path | None,
    no_preflight: bool,
    anonymise: bool,
    **options: Any,
) -> None:
    """Measure every case of scenarios, given as files or by bare name.

    Before the first case ncclep-doctor looks at this machine; what it finds is in the report and stops nothing.
    sweep --resume DIR alone repeats the command of the folder's run, of ncclep-bench run too.

    Under mpirun or srun, without --np, the launcher's ranks are used. Exit code 0: all cases passed or were waived;
    1: some failed or errored; 2: wrong usage or input; 3: nothing could run; 130: interrupted.
    """
    from ncclep_bench.sweeps.load import load_scenario, with_overrides

    if resume is not None and not scenarios:
        _again(resume, {"--np": options["ranks"], "--launcher": options["launcher"], "--format": options["formats"]})
        return
    if not scenarios:
        raise click.UsageError("Missing argument 'SCENARIO...'.")

    def load() -> list[Scenario]:
        return [with_overrides(load_scenario(name), _with_deadline(settings, deadline)) for name in scenarios]

    _measure(load, resume=resume, preflight=not no_preflight, anonymise=anonymise, **options)


@main.command()
@click.argument("collective")
@click.option("-b", "first", default="16", metavar="MIN", show_default=True, help="Smallest size: 4096, 8M, 1GiB.")
@click.option("-e", "last", metavar="MAX", help="Largest size.  [MIN]")
@click.option(
    "-f", "factor", type=click.IntRange(2), default=2, show_default=True, help="Each size is F times the last."
)
@click.option("--hidden", type=int, default=1024, show_default=True, help="Elements of a token.")
@click.option("--num-experts", type=int, help="Experts of the layer.  [two per rank]")
@click.option("--top-k", type=int, default=2, show_default=True, help="Experts per token.")
@click.option("--dtype", default="float32", show_default=True, help="Element type of the rows.")
@click.option("--mode", help="ht: counts first, exact sizes; ll: fixed slots.  [ht]")
@click.option("--layout", help="flat, expert_major or rank_major.  [flat for ht, expert_major for ll]")
@click.option("--routing", default="uniform", show_default=True, help="How tokens choose experts.")
@click.option("--routing-param", help="The routing's parameter, as the exponent of zipf.")
@click.option("--active-share", type=float, help="Share of experts that a rank needs or has gradients of.  [1]")
@click.option(
    "--partner/--no-partner", default=True, show_default=True, help="Measure the traditional partner too: TAG."
)
@_ranks_options
@_own_exit_codes
def run(
    collective: str,
    first: str,
    last: str | None,
    factor: int,
    partner: bool,
    settings: tuple[str, ...],
    deadline: float | None,
    **options: Any,
) -> None:
    """Measure one COLLECTIVE over a range of sizes, in the manner of nccl-tests.

    MIN and MAX are tokens per rank for collectives that move tokens, and bytes of one expert for those that move
    parameters or gradients.
    """
    from ncclep_bench.model.dtype import dtype_named
    from ncclep_bench.model.scenario import Scenario
    from ncclep_bench.sweeps.load import with_overrides

    definition = COLLECTIVES.get(collective)
    sizes = _sizes(first, last or first, factor)
    dtype = dtype_named(options.pop("dtype")).name
    if "tokens" in definition.axes:
        swept = {"tokens": sizes}
    else:
        swept = {"expert_elements": [max(1, size // dtype_named(dtype).itemsize) for size in sizes]}
    keys = ("hidden", "num_experts", "top_k", "mode", "layout", "routing", "routing_param", "active_share")
    given = {key: value for key in keys if (value := options.pop(key)) is not None}
    if "num_experts" not in given:
        given["experts_per_rank"] = 2
    axes = {"dtype": dtype, **swept, **given}
    base = Scenario(
        name=collective,
        file="the command line",
        text="",
        description=f"{collective} over {', '.join(swept)}",
        axes={"collective": [collective, *([definition.partner] if partner and definition.partner else [])]},
    )
    written = [f"{key}={value}" for key, value in axes.items()]

    def load() -> list[Scenario]:
        return [with_overrides(with_overrides(base, written, typed=False), _with_deadline(settings, deadline))]

    _measure(load, **options)


def _sizes(first: str, last: str, factor: int) -> list[int]:
    """MIN, MIN × FACTOR, … up to MAX."""
    from ncclep_bench.units import parse_bytes

    size, most = parse_bytes(first), parse_bytes(last)
    if not 0 < size <= most:
        raise InputError(f"-b {first} -e {last}: not a range of sizes", hint="allowed: 0 < MIN <= MAX")
    sizes = []
    while size <= most:
        sizes.append(size)
        size *= factor
    return sizes


def _again(directory: Path, instead: dict[str, Any]) -> NoReturn:
    """Continue a run with the command in its header, some of whose options may be replaced; others are refused."""
    from ncclep_bench.results.store import read_run

    context, known = click.get_current_context(), {"--resume", *instead}
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        if given and not known.intersection(parameter.opts):
            raise click.UsageError(f"--resume alone repeats the folder's command: leave out {parameter.opts[-1]}.")
    program, command, *arguments = read_run(directory).header.command
    options = ["--resume", str(directory)]
    for option, value in instead.items():
        values = value if isinstance(value, tuple) else () if value is None else (value,)
        options += [word for value in values for word in (option, str(value))]
    # A launcher's ranks start none.
    for option in ("--out", *options[::2], *(("--np", "--launcher") if _one_of_several() else ())):
        arguments = list(_without_option(arguments, option))
    main.main([command, *options, *arguments], prog_name=program)
    raise AssertionError("click leaves with an exit code")


def _one_of_several() -> bool:
    """Whether a launcher has started this process among others; a shell that srun has started is alone."""
    from ncclep_bench.runtime.world import environment_sizes, in_mpi_environment

    return in_mpi_environment() and environment_sizes()[0] != 1


def _without_option(arguments: Sequence[str], option: str) -> Iterable[str]:
    words = iter(arguments)
    for word in words:
        if word == option:
            next(words, None)
        elif not word.startswith(f"{option}="):
            yield word


def _with_deadline(settings: Sequence[str], deadline: float | None) -> list[str]:
    return [*settings, *([] if deadline is None else [f"deadline_s={deadline}"])]


def _measure(
    load: Callable[[], list[Scenario]],
    *,
    ranks: int | None,
    launcher: str | None,
    backends: tuple[str, ...],
    expression: str | None,
    dry_run: bool,
    out: Path | None,
    formats: tuple[str, ...],
    repeats: int,
    resume: Path | None,
    preflight: bool = False,
    anonymise: bool = False,
) -> None:
    """Plan, measure, report, and leave with the run's exit code."""
    from contextlib import closing

    from ncclep_bench.results.store import folder_of
    from ncclep_bench.runtime.launch import ended_as_at_the_keyboard
    from ncclep_bench.runtime.world import environment_rank, environment_sizes, in_mpi_environment
    from ncclep_bench.sweeps.anonymise import anonymise_run, refuse_personal
    from ncclep_bench.sweeps.run import exit_code, last_words, plan_sweep, run_supervised

    if resume is not None:
        if out is not None:
            raise click.UsageError("--resume goes on in its own folder: leave out --out.")
        resume = folder_of(resume)
    renderers = _renderers(formats or _DEFAULT_FORMATS)
    command = ["ncclep-bench", *sys.argv[1:]]

    knows = _anonymous() if anonymise else None

    def plan(available: int | None) -> Plan:
        planned = plan_sweep(load(), ranks=available, backends=backends, expression=expression)
        if knows is not None:
            refuse_personal(planned.cases, knows)
        return planned

    if ranks is not None and _one_of_several():
        raise InputError(
            f"--np {ranks} in a rank of a launcher, which would start ranks of its own in each",
            hint="leave out --np, or mpirun and srun",
        )
    if dry_run:
        if not environment_rank():
            _show_dry_run(plan(environment_sizes()[0] if ranks is None and in_mpi_environment() else ranks))
        return
    if ranks is None and in_mpi_environment():
        from ncclep_bench.sweeps.ranks import run_in_ranks

        done = run_in_ranks(
            plan,
            resume or out,
            _watcher(),
            command=command,
            repeats=repeats,
            resume=resume is not None,
            preflight=_preflight(None) if preflight else None,
        )
        if done.rank:
            sys.exit(done.exit_code)
        if knows is not None:
            anonymise_run(done.directory, knows)
        _report(done.directory, renderers)
        sys.exit(done.exit_code)
    planned = plan(ranks)
    found = _preflight(max(case.ranks for case in planned.cases)) if preflight else None
    watcher = _watcher()
    with ended_as_at_the_keyboard(), closing(watcher):
        directory = run_supervised(
            planned,
            resume or out,
            command=command,
            watcher=watcher,
            repeats=repeats,
            launcher=launcher,
            resume=resume is not None,
            preflight=found,
        )
    if knows is not None:
        anonymise_run(directory, knows)
    _report(directory, renderers)
    code = exit_code(directory)
    if code and (words := last_words(directory)):
        click.echo(words, err=True)
    sys.exit(code)


def _anonymous() -> Anonymous:
    """Knows this machine and who works here."""
    import socket

    from ncclep_bench.doctor.anonymise import anonymous

    knows = anonymous()
    knows.learn_host(socket.gethostname())
    return knows


def _preflight(ranks: int | None) -> Preflight | None:
    """What the doctor says of this machine, for the first rank to record; whatever it says, the sweep goes on."""
    from ncclep_bench.doctor.preflight import look, record
    from ncclep_bench.doctor.render import preflight_as_console
    from ncclep_bench.model.measurement import Preflight
    from ncclep_bench.runtime.world import environment_rank

    if environment_rank():
        return None
    try:
        findings = look(ranks)
    except BenchError as error:
        click.echo(f"preflight: {_printable(str(error))}", err=True)
        return Preflight(failure=error.message)
    colour = _is_terminal(sys.stderr) and not os.environ.get("NO_COLOR")
    click.echo(preflight_as_console(findings, colour=colour), nl=False, err=True)
    return record(findings)


def _renderers(formats: Sequence[str]) -> dict[str, Format]:
    """Formats by name, known before anything runs; raises InputError for an unknown one."""
    return {name: FORMATS.get(name) for name in dict.fromkeys(formats)}


def _watcher() -> Any:
    from ncclep_bench.sweeps.progress import Bar, Lines

    return Bar() if _is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb" else Lines(sys.stderr)


def _report(directory: Path, formats: dict[str, Format]) -> None:
    """Render a run into its folder and onto standard output."""
    from ncclep_bench.results.frames import load_run

    _render(load_run(directory), formats, directory)


def _render(frames: RunFrames, formats: dict[str, Format], directory: Path) -> None:
    """Formats that have a file go to `directory`, the others to standard output; says where the files are."""
    for name, render in formats.items():
        if name == "console" and _is_terminal(sys.stdout):
            from rich.console import Console

            from ncclep_bench.reporting.console import print_to

            print_to(Console(), frames)
        elif render.file is not None:
            _write(directory / render.file, render(frames))
        else:
            click.echo(render(frames), nl=False)
    click.echo(f"results: {_printable(str(directory))}", err=True)


def _is_terminal(stream: TextIO | None) -> bool:
    # Python has None for a stream that was closed before it started.
    return stream is not None and stream.isatty()


def _write(file: Path, data: bytes) -> None:
    partial = file.with_name(f".{file.name}.partial")
    try:
        try:
            partial.write_bytes(data)
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror}", hint="choose another folder") from None


def _show_dry_run(plan: Plan) -> None:
    from ncclep_bench.sweeps.dryrun import foresee
    from ncclep_bench.units import format_bytes

    def shown(count: int | None) -> str:
        return "-" if count is None else format_bytes(count)

    click.echo(f"{'payload':>10} {'planned':>10} {'mem/rank':>10} {'memory':>10}  case")
    count = waived = most = 0
    for row in foresee(plan):
        count, waived, most = count + 1, waived + bool(row.waiver), max(most, row.memory_bytes or 0)
        figures = (row.payload_bytes, row.planned_bytes, row.memory_per_rank_bytes, row.memory_bytes)
        why = f"  waived: {row.waiver}" if row.waiver else ""
        click.echo(" ".join(f"{shown(figure):>10}" for figure in figures) + f"  {_printable(row.case.case)}{why}")
    click.echo(f"{count} cases, {waived} of them waived here, {shown(most)} of buffers in the largest")


@main.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option("--format", "formats", multiple=True, help=f"Of {', '.join(FORMATS)}; may be repeated.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder for files.  [the run's; of several reports/RUN+RUN-TIME]"
)
@_own_exit_codes
def report(runs: tuple[Path, ...], formats: tuple[str, ...], out: Path | None) -> None:
    """Render recorded runs again, several of them into one report."""
    from ncclep_bench.results.frames import load_run
    from ncclep_bench.results.store import folder_of, new_folder

    renderers = _renderers(formats or _DEFAULT_FORMATS)
    frames = load_run(list(runs))
    folders = [folder_of(run) for run in runs]
    # What several runs have in common is in none of them.
    has_files = any(render.file for render in renderers.values())
    joined = len(runs) > 1 and has_files
    folder = out or (new_folder(folder.resolve().name for folder in folders) if joined else folders[0])
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot write {out}: {error.strerror}", hint="choose another --out") from None
    _render(frames, renderers, folder)


@main.group()
def scenarios() -> None:
    """List, show and check scenario files."""


@scenarios.command("list")
@_own_exit_codes
def list_scenarios() -> None:
    """Print name and description of every scenario that has a bare name."""
    from ncclep_bench.sweeps.load import find_scenarios, load_scenario

    for name in find_scenarios():
        click.echo(_printable(f"{name:<22} {load_scenario(name).description}"))


@scenarios.command()
@click.argument("name")
@_own_exit_codes
def show(name: str) -> None:
    """Print a scenario's file."""
    from ncclep_bench.sweeps.load import load_scenario

    click.echo(load_scenario(name).text, nl=False)


@scenarios.command()
@click.argument("files", nargs=-1, required=True)
@click.option("--np", "ranks", type=click.IntRange(1, 65536), help="Ranks, where the file names none.  [4]")
@_own_exit_codes
def check(files: tuple[str, ...], ranks: int | None) -> None:
    """Load scenarios and expand them into cases; exit code 2 for the first that is wrong."""
    from ncclep_bench.sweeps.load import load_scenario
    from ncclep_bench.sweeps.run import plan_sweep

    for file in files:
        scenario = load_scenario(file)
        there = 4 if ranks is None and "ranks" not in scenario.axes else ranks
        click.echo(f"{_printable(scenario.file)}: {len(plan_sweep([scenario], ranks=there).cases)} cases")


if __name__ == "__main__":
    main()
