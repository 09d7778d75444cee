"""The direction of the arrows: layers, gates to foreign libraries, and command lines that start light."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = (
    "altair",
    "cupy",
    "jinja2",
    "ml_dtypes",
    "mpi4py.MPI",
    "nccl",
    "networkx",
    "numpy",
    "pandas",
    "pynvml",
    "scipy",
    "vl_convert",
)


def lint_imports(project: Path) -> subprocess.CompletedProcess[str]:
    command = [shutil.which("lint-imports", path=Path(sys.executable).parent) or "lint-imports", "--no-cache"]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)


def test_every_import_keeps_its_contract():
    done = lint_imports(ROOT)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("errors.py", "import ncclep_bench.model.case", "A module imports only from layers below its own BROKEN"),
        ("doctor/planted.py", "import ncclep_bench.sweeps", "A module imports only from layers below its own BROKEN"),
        ("results/planted.py", "def f():\n    import mpi4py.MPI", "Only runtime.world imports mpi4py BROKEN"),
        ("backends/planted.py", "def f():\n    import cupy", "Only runtime.device imports cupy BROKEN"),
        ("backends/planted.py", "def f():\n    import nccl.core", "Only runtime.nccl imports NCCL's bindings BROKEN"),
        ("doctor/planted.py", "def f():\n    import pynvml", "Only runtime.nvml imports pynvml BROKEN"),
        ("helpers.py", "", "not listed as layers"),
    ],
    ids=["upwards", "sideways", "mpi4py", "cupy", "nccl", "pynvml", "no-layer"],
)
def test_a_planted_import_breaks_the_contract(file: str, line: str, contract: str, tmp_path: Path):
    shutil.copytree(ROOT / "ncclep_bench", tmp_path / "ncclep_bench", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "ncclep_bench" / file).open("a") as module:
        module.write(f"\n{line}\n")

    done = lint_imports(tmp_path)

    assert done.returncode != 0
    assert contract in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    "module", ["ncclep_bench", "ncclep_bench.cli", "ncclep_bench.doctor_cli", "ncclep_bench.registry"]
)
def test_a_command_line_is_imported_without_heavy_libraries(module: str):
    code = f"import sys, {module}; print(*(name for name in {HEAVY!r} if name in sys.modules))"

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], "")
