"""Relations between processes: how a child ends with its parent, and what identifies a process. Free of torch."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from functools import cache
from pathlib import Path

PARENT = "TITAN_PARENT"
"""Environment variable: id of the parent process that this process must not outlive."""

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 1.0
_IMPORTED = time.time()


def python(*arguments: str) -> list[str]:
    """Return the command that runs this Python. It imports nothing from the current folder, where a ``random.py`` would run
    in place of Python's own."""
    return [sys.executable, "-P", *arguments]


def environment_of_child() -> dict[str, str]:
    """Return the environment variables for starting a process that must not outlive this one."""
    return {PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent ends, for whatever reason. Does nothing in a process that was
    started by a person, or by a launcher other than Titan's and torchrun.

    The thread of the parent that started this process must live as long as the parent.
    """
    parent = os.environ.pop(PARENT, None)
    if parent is None and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    expected = os.getppid() if parent is None else int(parent)
    if not _request_death_signal():
        threading.Thread(target=_watch, args=(expected,), name="parent", daemon=True).start()
    if os.getppid() != expected:  # the parent ended before the request
        os._exit(128 + signal.SIGKILL)


def _request_death_signal() -> bool:
    if sys.platform != "linux":
        return False
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return bool(prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0)


def _watch(parent: int) -> None:
    """Poll the parent on systems without a death signal: a process whose parent has ended is adopted by another one."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(128 + signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Whether a process of this PID namespace has the id ``pid``."""
    try:
        os.kill(pid, 0)  # signal 0 only checks existence
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # it belongs to another user
    return True


def pid_namespace() -> str | None:
    """Return the PID namespace, which together with the machine makes a process id unique: each container of a machine may
    number its processes separately. ``None`` if the system does not provide it (macOS)."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


@cache
def process_began() -> float:
    """Return when this process was created, in seconds since the epoch, to about 10 ms; on systems without ``/proc``, when
    it imported this module."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return _IMPORTED
    return time.time() - age
