"""Listing plugins and printing help are quick and free of torch, with all packages installed."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = [
    ["--help"],
    ["plugins"],
    ["recipes"],
    ["recipe", "copy", "llama3_debug", "my.toml"],
    ["config", "check"],
    ["config", "show"],
    ["config", "schema"],
    ["job", "show"],
]
HEAVY = {"torch", "datasets", "numpy", "rich"}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_nothing_heavy_is_imported(tmp_path: Path, command: list[str]) -> None:
    program = (
        "import sys\nfrom titan_core.__main__ import main\n"
        f"sys.argv = ['titan', *{command!r}]\nassert main() == 0\n"
        f"print('IMPORTED', sorted({HEAVY!r} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert result.stdout.endswith("IMPORTED []\n")


@pytest.mark.parametrize("command", [["--help"], ["plugins"], ["config", "check"]], ids=" ".join)
def test_commands_take_at_most_half_a_second(command: list[str]) -> None:
    """The limit scales with the machine's speed if importing pydantic takes more than 0.15 s."""

    def seconds(*arguments: str) -> float:
        """Return CPU time, which excludes other load on the machine."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    rounds = [(seconds("-m", "titan_core", *command), seconds("-c", "import pydantic.main")) for _ in range(5)]
    ours, pydantics = (min(times) for times in zip(*rounds, strict=True))
    assert ours < 0.5 * max(1.0, pydantics / 0.15)


def test_an_interrupt_after_the_end_leaves_no_traceback() -> None:
    program = (
        "import atexit, os, signal, sys, threading\nfrom titan_core.__main__ import main\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "sys.argv = ['titan', '--version']\nsys.exit(main())"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == -signal.SIGINT
    assert result.stdout.startswith("titan-core ") and result.stderr == ""
