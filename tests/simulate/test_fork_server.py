"""Calls in forks: what they return, raise and print."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("titan_simulate")

from titan_core.api.errors import UserError
from titan_simulate.engine.fork_server import RemoteError, call_in_fork, call_in_forks


def test_results_come_in_the_order_of_the_functions() -> None:
    found = call_in_forks([lambda: (1, os.getpid()), lambda: (2, os.getpid())], at_once=2)
    assert [one[0] for one in found] == [1, 2]
    assert len({os.getpid(), *(one[1] for one in found)}) == 3


def test_errors_are_raised_here_with_the_traceback_of_the_fork() -> None:
    def wrong() -> None:
        raise UserError.one("--here", "is wrong", "fix it")

    with pytest.raises(UserError, match="is wrong") as caught:
        call_in_fork(wrong)
    assert isinstance(caught.value.__cause__, RemoteError) and "in wrong" in str(caught.value.__cause__)
    with pytest.raises(RemoteError, match="exit code 3"):
        call_in_fork(lambda: os._exit(3))


PRINTS = """
import sys
from titan_simulate.engine.fork_server import print_from_fork
def command():
    print("a line")
    return 5
sys.exit(print_from_fork(command))
"""


def test_a_command_in_a_fork_prints_once_and_keeps_its_status() -> None:
    ended = subprocess.run([sys.executable, "-c", PRINTS], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (5, "a line\n", "")


def test_its_output_is_written_by_the_process_itself() -> None:
    """A fork ends without the interpreter, so a full disk or a closed pipe would go unnoticed there."""
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", PRINTS], stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode != 5 and "No space left on device" in ended.stderr
