"""Processes and their parents: ending with the one that started this one, and telling processes apart. Free of torch."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PARENT = "TITAN_PARENT"
"""Environment variable: id of the process that this one must not outlive."""

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 1.0


def environment_of_child() -> dict[str, str]:
    """What a process that must not outlive this one is started with."""
    return {PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """Have the kernel end this process when its parent ends, however that does. Without effect in a process that a person or
    another launcher than Titan's or torchrun has started.

    The parent's thread that started this process must live as long as the parent.
    """
    parent = os.environ.pop(PARENT, None)
    if parent is None and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    expected = os.getppid() if parent is None else int(parent)
    if not _ask_kernel():
        threading.Thread(target=_watch, args=(expected,), name="parent", daemon=True).start()
    if os.getppid() != expected:  # it had ended before
        os._exit(128 + signal.SIGKILL)


def _ask_kernel() -> bool:
    if sys.platform != "linux":
        return False
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return bool(prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0)


def _watch(parent: int) -> None:
    """Where the kernel offers nothing: whose parent has ended gets another one."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(128 + signal.SIGKILL)


def pid_namespace() -> str | None:
    """In what, besides the machine's name, this process's id is unique: containers of one machine may each number their own
    processes. ``None`` where the system does not say (macOS)."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
