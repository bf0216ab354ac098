"""A process ends with its parent, however the parent ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from titan_core.toolkit.processes import PARENT

CHILD = """
import sys, time
from titan_core.toolkit import processes as parent_process
if sys.argv[1] == "watched":
    parent_process._request_death_signal, parent_process._POLL_SECONDS = (lambda: False), 0.01
parent_process.end_with_parent()
print(parent_process.PARENT in parent_process.os.environ, flush=True)
time.sleep(600)
"""
PARENT_OF_IT = """
import os, subprocess, sys
from titan_core.toolkit.processes import environment_of_child
child = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], env={**os.environ, **environment_of_child()})
child.wait()
"""


@pytest.mark.parametrize("how", ["by the kernel", "watched"])
def test_a_child_of_a_killed_process_ends(how: str) -> None:
    command = [sys.executable, "-c", PARENT_OF_IT, CHILD, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        # The child does not pass the variable to its own children, which do not belong to the launcher.
        assert parent.stdout.readline() == "False\n"
        parent.kill()
        assert parent.stdout.read() == ""  # the pipe closes only when the child has ended too


def test_a_child_whose_parent_ended_before_the_request_ends_immediately() -> None:
    environment = {**os.environ, PARENT: str(os.getppid())}
    done = subprocess.run([sys.executable, "-c", CHILD, ""], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (128 + signal.SIGKILL, "")


@pytest.mark.parametrize(("launcher", "ends"), [({}, "False"), ({"TORCHELASTIC_RUN_ID": "job"}, "True")])
def test_torchruns_ranks_end_with_it_and_a_persons_process_does_not(launcher: dict[str, str], ends: str) -> None:
    script = """
from titan_core.toolkit import processes as parent_process
asked = []
parent_process._request_death_signal = lambda: asked.append(1) or True
parent_process.end_with_parent()
print(bool(asked))
"""
    plain = {name: value for name, value in os.environ.items() if name not in (PARENT, "TORCHELASTIC_RUN_ID")}
    done = subprocess.run(
        [sys.executable, "-c", script], env={**plain, **launcher}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ends
