"""Calls in forks: what they return, raise and print."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest

from harness.fake_cuda import FakeCuda
from titan_testing import PATIENCE

pytest.importorskip("titan_simulate")

from titan_core.api import UserError
from titan_simulate.engine.forks import Forker, RemoteError, call_in_fork, call_in_forks


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
from titan_simulate.engine.command_fork import print_from_fork
def command(report):
    print("a line")
    return 5
sys.exit(print_from_fork(command, "working"))
"""


def test_a_command_in_a_fork_prints_once_and_keeps_its_status() -> None:
    ended = subprocess.run([sys.executable, "-c", PRINTS], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (5, "a line\n", "")


def test_its_output_is_written_by_the_process_itself() -> None:
    """A fork ends without the interpreter, so a full disk or a closed pipe would go unnoticed there."""
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", PRINTS], stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode != 5 and "No space left on device" in ended.stderr


WAITS = """
import os, signal, sys
from titan_core.cli.main import main
from titan_simulate.engine import command_fork, forks

def wait():
    os.write(1, b"ready\\n")  # past what is captured
    while True:
        signal.pause()

def command(report):
    try:
        forks.call_in_forks([wait, wait], at_once=2)
    except KeyboardInterrupt:
        if sys.argv[1] == "prints":
            print("the best so far")
            return 130
        if sys.argv[1] == "hangs":
            os.write(1, b"hangs\\n")
            wait()
        raise

try:
    sys.exit(command_fork.print_from_fork(command, "working"))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("whom", ["the process", "all of the terminal"])
@pytest.mark.parametrize(("what", "printed"), [("prints", "the best so far\n"), ("raises", ""), ("hangs", "hangs\nready\n")])
def test_an_interrupt_ends_a_command_and_its_forks(what: str, printed: str, whom: str) -> None:
    """Once, so that it can print what it has; twice, at once. No process is left, and nobody prints a traceback."""
    script = WAITS.replace("\\\\n", "\\n")
    process = subprocess.Popen(
        [sys.executable, "-c", script, what],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2

    def interrupt() -> None:
        (os.kill if whom == "the process" else os.killpg)(process.pid, signal.SIGINT)

    interrupt()
    if what == "hangs":
        assert [process.stdout.readline() for _ in range(2)] == printed.splitlines(keepends=True)
        interrupt()
        printed = ""
    out, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, errors) == (130, printed, "")
    deadline = time.monotonic() + PATIENCE
    while _has_members(process.pid):  # until the system has reaped them
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _has_members(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_progress_is_what_the_command_has_reported_last() -> None:
    from titan_core.toolkit.status import current_phase
    from titan_simulate.engine import command_fork

    shown: list[str] = []

    def follow(pipe: Connection, reports: Connection, latest: list[str]) -> None:
        original(pipe, reports, latest)
        shown.append(str(current_phase()))

    def command(report: Callable[[str], None]) -> int:
        report("1 of 2")
        report("2 of 2")
        return 0

    original, command_fork._follow = command_fork._follow, follow
    try:
        assert command_fork.print_from_fork(command, "working") == 0
    finally:
        command_fork._follow = original
    assert shown == ["working: 2 of 2"]


DESCRIBES = """
import sys
from titan_simulate.engine import stub_libraries
from titan_simulate.engine.forks import describe_first
def assemble():
    import torch
    return torch.ones(2) @ torch.ones(2)
describe_first(assemble)
assert "torch" not in sys.modules
stub_libraries.load()
"""


def test_a_model_may_compute_to_describe_itself(fake_cuda: FakeCuda) -> None:
    ended = subprocess.run([sys.executable, "-c", DESCRIBES], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_forker_answers_calls_and_raises_what_they_raise() -> None:
    learned = [1]

    def answer(number: int) -> tuple[int, int]:
        if number < 0:
            raise ValueError(f"{number} is negative")
        return number + len(learned), os.getpid()

    forker = Forker(answer)
    learned.append(2)  # the fork does not learn it
    try:
        first, second = forker(1), forker(2)
        assert [number for number, _ in (first, second)] == [2, 3]
        assert first[1] == second[1] != os.getpid()
        with pytest.raises(ValueError, match="-1 is negative"):
            forker(-1)
        assert forker(0)[0] == 1
    finally:
        forker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(first[1], 0)
