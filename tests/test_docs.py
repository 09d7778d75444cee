"""The documentation says what the product does: first lines, columns, commands, extension points."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ncclep_bench.registry import COLLECTIVES, ROUTINGS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FIRST_COMMANDS = [
    "git clone … && cd … && python3 -m venv .venv && .venv/bin/pip install '.[mpi]' "
    "&& .venv/bin/ncclep-bench sweep scenarios/quick.toml --np 4",
    ".venv/bin/pip install -e '.[mpi,test]' && .venv/bin/pytest",
]


def command_lines() -> dict[str, click.Group]:
    from ncclep_bench import cli, doctor_cli

    return {"ncclep-bench": cli.main, "ncclep-doctor": doctor_cli.main}


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command of both programs, `ncclep-bench scenarios list` in full."""
    open_groups = list(command_lines().items())
    for path, group in open_groups:
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            yield f"{path} {name}", command
            if isinstance(command, click.Group):
                open_groups.append((f"{path} {name}", command))


def test_the_readme_starts_with_the_line_that_measures_and_the_line_that_tests():
    blocks = re.findall(r"^ {4}(\S.*)$", README, flags=re.MULTILINE)

    assert blocks[:2] == FIRST_COMMANDS


def test_the_page_of_columns_is_current():
    script = ROOT / "docs" / "generate_columns.py"

    page = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert (ROOT / "docs" / "columns.md").read_text() == page, "python docs/generate_columns.py > docs/columns.md"


def test_every_command_is_in_the_readme_and_has_help():
    for path, command in commands():
        program, first, *rest = path.split()
        assert f"`{program} {first}" in README, path
        assert all(f"`{name}" in README or f" {name}" in README for name in rest), path
        assert command.help, path


def test_the_readme_names_no_command_that_does_not_exist():
    known = {" ".join(path.split()[:2]) for path, _ in commands()}

    named = set(re.findall(r"\bncclep-(?:bench|doctor) [a-z]+", "\n".join(re.findall(r"`[^`\n]+`", README))))

    assert named
    assert named - known == set()


def test_every_collective_is_in_the_readme():
    assert [name for name in COLLECTIVES if f"`{name}`" not in README] == []


def test_the_page_of_scenarios_names_every_key_and_every_routing():
    from ncclep_bench.model.scenario import ExpertLoad, Reference, Timing
    from ncclep_bench.sweeps.load import axis_types

    page = (ROOT / "docs" / "scenarios.md").read_text()
    records = [name for record in (Timing, Reference, ExpertLoad) for name in record.__struct_fields__]

    names = {*axis_types(), *records, *ROUTINGS} - {"topology", "verified"}

    assert {name for name in names if f"`{name}`" not in page} == set()


def test_the_example_of_a_scenario_is_one(tmp_path: Path):
    from ncclep_bench.sweeps.load import load_scenario
    from ncclep_bench.sweeps.run import plan_sweep

    block = (ROOT / "docs" / "scenarios.md").read_text().split("\n    ", 1)[1].split("\n\n`", 1)[0]
    file = tmp_path / "example.toml"
    file.write_text(textwrap.dedent(f"    {block}"))

    assert len(plan_sweep([load_scenario(file)], ranks=4).cases) == 8


PAGES = ["README.md", "CONTRIBUTING.md", "docs/files.md", "docs/method.md", "docs/scenarios.md"]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file(page: str):
    file = ROOT / page
    targets = re.findall(r"\]\(([^)#:]+)\)", file.read_text())

    assert [target for target in targets if not (file.parent / target).exists()] == []


@pytest.mark.parametrize(
    "kind",
    ["collective", "backend", "doctor check", "report format", "format of findings", "topology", "routing", "scenario"],
)
def test_an_extension_point_has_a_recipe_of_at_most_ten_lines(kind: str):
    contributing = (ROOT / "CONTRIBUTING.md").read_text()

    _, recipe = contributing.split(f"**A {kind}**\n")

    steps = recipe.split("\n\n")[0].splitlines()
    assert 1 <= len(steps) <= 10
