"""Tries a mutant: runs tests against a copy of the tree in which one line is changed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.mutants.mutant import ROOT, SOURCES, Mutant

DEFAULT, FULL = "not long and (not full or slow)", "full and not (long or slow)"
"""Marks of the tests that a mutant is tried on, one after the other."""

_NONE_HAS_THE_MARKS = 5  # pytest's exit status


@dataclass(frozen=True)
class Verdict:
    """The result of trying a mutant."""

    killed_by: str
    """The test that failed, or how else the run ended; empty if the mutant survived."""
    seconds: float


@contextmanager
def copied_tree() -> Iterator[Path]:
    """Yield a temporary copy of the files that git tracks or would track."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        for name in filter(None, listed.split("\0")):
            source, target = ROOT / name, Path(folder) / name
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        yield Path(folder)


def try_out(tree: Path, mutant: Mutant, tests: Sequence[str], timeout: float, marks: str = DEFAULT) -> Verdict:
    """Run those of ``tests`` that have the ``marks`` with the mutant.

    Raises:
        ValueError: the mutant cannot be applied to these sources.
        RuntimeError: pytest could not run the tests.
    """
    file = tree / mutant.path
    original, changed = file.read_text(encoding="utf-8"), mutant.mutated(tree)
    started = time.monotonic()
    try:
        _write(tree, file, changed)
        killed_by = run_tests(tree, tests, timeout, marks)
    finally:
        _write(tree, file, original)
    return Verdict(killed_by, time.monotonic() - started)


def run_tests(tree: Path, tests: Sequence[str], timeout: float, marks: str = DEFAULT) -> str:
    """Return the first of ``tests`` that fails in ``tree``; empty if all pass, or none has the ``marks``. They run in a
    process forked from this one, which has already imported torch: the import takes longer than most tests."""
    log = tree / "pytest.log"
    pid = os.fork()
    if pid == 0:
        _child(tree, tests, marks, log)
    with suppress(PermissionError, ProcessLookupError):  # the child has done this itself, or has ended
        os.setpgid(pid, pid)
    deadline = time.monotonic() + timeout
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return f"timeout after {timeout:.0f} s"
        time.sleep(0.05)
    _end_group(pid)
    code = os.waitstatus_to_exitcode(status)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    if code in (0, _NONE_HAS_THE_MARKS):
        return ""
    if code not in (1, 2):
        raise RuntimeError("\n".join([f"{' '.join(tests)}: pytest ended with status {code}", *lines[-20:]]))
    failed = (line for line in lines if re.match(r"(FAILED|ERROR) \S+\.py", line))
    return next(failed, f"pytest ended with status {code}").partition(" - ")[0]


def preload() -> None:
    """Import the modules that most tests need and no mutant changes."""
    import pydantic
    import pytest
    import rich.console
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel
    import torch.optim

    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])  # imports the compiler's front end
    assert pydantic and pytest and rich
    ours = [name for name in sys.modules if name.partition(".")[0].startswith("titan_")]
    assert not ours, f"these modules would be tested without the mutant: {ours}"


def _child(tree: Path, tests: Sequence[str], marks: str, log: Path) -> None:
    """Run pytest in the forked process, and exit with its status."""
    os.setpgid(0, 0)
    status = 3
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        # The parent may have replaced them.
        sys.stdout = sys.stderr = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 (until the process ends)
        os.chdir(tree)
        paths = [str(tree / source.rpartition("/")[0]) for source in SOURCES.values()]
        paths += [str(source) for source in tree.glob("packages/*/src") if str(source) not in paths]
        sys.path[:] = [*paths, *(path for path in sys.path if not _is_checkout(path))]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        os.environ["OMP_NUM_THREADS"] = "1"
        sys.dont_write_bytecode = False
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(_bytecode(tree))
        # Processes started by multiprocessing import the main module again, which must not be this command.
        sys.modules["__main__"] = types.ModuleType("__main__")
        for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
            del sys.modules[name]
        import pytest

        status = pytest.main(
            [
                "-x",
                "-q",
                "-n",
                "0",
                "-m",
                marks,
                "-p",
                "no:cacheprovider",
                "--tb=line",
                f"--rootdir={tree}",
                *tests,
            ]
        )
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(status))


def _is_checkout(path: str) -> bool:
    return Path(path or ".").resolve().is_relative_to(ROOT) and "site-packages" not in path


def _end_group(pid: int) -> None:
    """Kill all processes that a trial has left behind."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _write(tree: Path, file: Path, text: str) -> None:
    """Write a source file, and delete its bytecode: the new file may have the old one's time and size."""
    file.write_text(text, encoding="utf-8")
    for compiled in _bytecode(tree).rglob(f"{file.stem}.*.pyc"):
        compiled.unlink()


def _bytecode(tree: Path) -> Path:
    """Return the folder of all bytecode that trials in ``tree`` write."""
    return tree / "bytecode"
