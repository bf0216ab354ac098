"""Files beside the user that have the names of modules: nothing imports them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from titan_testing import PATIENCE

HOSTILE = "import os\nos.open(os.path.dirname(os.path.abspath(__file__)) + '/imported-' + __name__, os.O_CREAT)\n"
SOURCES = Path(__file__).parents[2] / "packages"


def names() -> Iterator[str]:
    """Return all modules of Python's library, and all top-level ones that are installed."""
    yield from sys.stdlib_module_names
    yield from (name for name in packages_distributions() if name.isidentifier())


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder full of modules that leave a file."""
    for name in names():
        (tmp_path / f"{name}.py").write_text(HOSTILE)
    return tmp_path


def run(folder: Path, *command: str) -> str:
    of_tests = ("PYTHONPATH", "PYTHONSAFEPATH", "TITAN_DISABLE_PLUGINS")
    environment = {name: value for name, value in os.environ.items() if name not in of_tests}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def imported(folder: Path) -> set[str]:
    return {path.name.removeprefix("imported-") for path in folder.glob("imported-*")}


@pytest.mark.full
def test_ranks_and_data_workers_import_nothing_from_the_current_folder(hostile: Path) -> None:
    titan = str(Path(sys.executable).with_name("titan"))
    options = ["--training.steps", "2", "--data.num_workers", "1", "--job.device", "cpu", "--job.dump_folder", "run"]
    run(hostile, titan, "train", "llama3_debug", "--nproc-per-node", "2", *options)
    assert (hostile / "run/metrics.jsonl").exists() and imported(hostile) == set()


def test_a_command_by_python_m_imports_nothing_but_what_python_does_itself(hostile: Path) -> None:
    """Before Titan can drop the current folder (docs/security.md)."""
    modules = run(hostile.parent, sys.executable, "-c", "import sys, runpy; print(*sys.modules)").split()
    early = {name.partition(".")[0] for name in modules} | {"titan_core", "pkgutil"}
    assert not early & {"random", "json", "torch", "pydantic", "tomli", "logging", "argparse"}
    for name in early:
        (hostile / f"{name}.py").unlink(missing_ok=True)
    run(hostile, sys.executable, "-m", "titan_core", "plugins")
    assert imported(hostile) == set()


def test_every_process_that_titan_starts_by_itself_ignores_the_current_folder() -> None:
    """Each by :func:`titan_core.toolkit.processes.python`, or by a command that is not Python's."""
    found = {
        f"{path.name}:{number}"
        for path in SOURCES.glob("*/src/**/*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"\[sys\.executable\b", line)
    }
    assert {place.partition(":")[0] for place in found} == {"processes.py"}, found
