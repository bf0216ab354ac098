"""What a test leaves behind: threads and processes, which fail the test, and settings of its process, which are undone.

Plugins of pytest that find threads neither wait for those that are ending nor look for processes; none undoes settings.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import re
import resource
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titan_core.loop.gc_settings import gc_as_before
from titan_core.loop.process_settings import numerics_as_before
from titan_core.toolkit.status import hide_all
from titan_testing import gloo_pool
from titan_testing.gloo_pool import restore_environment

GRACE = 30.0
"""Seconds that what is already ending may take. Only a test that fails waits for so long."""

OF_LIBRARIES = re.compile(
    r"asyncio_\d+|fsspecIO"  # the event loop of fsspec
    r"|tqdm_monitor"
    r"|Otel\w+"  # W&B's telemetry
    r"|Thread-\d+ \(_serve\)"  # multiprocessing's, which hands the memory of tensors to other processes
)
"""Names of threads that a library starts once for the whole process and never ends."""

RENDERER = "template_worker"
"""Last name of the module of the process that renders templates for another one, and ends with that."""

_MARK = "STARTED_BY_A_TEST"
"""Environment variable whose value no other test has, in this run or in another one on the machine. The processes that a
test starts inherit it."""

_numbers = itertools.count()
_run = uuid.uuid4().hex


def seed() -> None:
    """Seed every generator of the process, so that what a test draws does not depend on the tests before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@contextmanager
def settings_undone() -> Iterator[None]:
    """Undo what the block does to the settings of its process."""
    number = torch.get_num_threads()
    dtype = torch.get_default_dtype()
    variables, path, disabled = dict(os.environ), list(sys.path), logging.root.manager.disable
    levels = {name: logger.level for name, logger in _loggers().items()}
    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    }
    umask = os.umask(0o077)
    os.umask(umask)
    try:
        with gc_as_before(), numerics_as_before():
            yield
    finally:
        if torch.get_num_threads() != number:
            torch.set_num_threads(number)
        torch.set_default_dtype(dtype)
        hide_all(False)  # an interrupted job hides the progress of its process
        os.umask(umask)
        if logging.root.manager.disable != disabled:
            logging.disable(disabled)
        for name, logger in _loggers().items():
            level = levels.get(name, logging.NOTSET)
            if logger.level != level:  # setting one clears a cache of every logger
                logger.setLevel(level)
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        if sys.path != path:
            sys.path[:] = path
        restore_environment({**variables, **_of_pytest()})


def _loggers() -> dict[str, logging.Logger]:
    known = logging.root.manager.loggerDict.items()
    return {name: logger for name, logger in known if name.startswith("titan") and isinstance(logger, logging.Logger)}


def _of_pytest() -> dict[str, str]:
    """Return the variable that pytest changes between the phases of a test."""
    return {name: value for name, value in os.environ.items() if name == "PYTEST_CURRENT_TEST"}


def _compiles(thread: threading.Thread) -> bool:
    """Whether ``thread`` belongs to the pool that torch's compiler keeps for the whole process. Its name says nothing."""
    compiler = sys.modules.get("torch._inductor.async_compile")
    pool = None if compiler is None else compiler.AsyncCompile.pool
    return pool is not None and bool(pool.cache_info().currsize) and thread in pool()._threads


class Leftovers:
    """The threads and processes that a test starts and does not end."""

    def __init__(self) -> None:
        self._mark = os.environ[_MARK] = f"{_run}-{os.getpid()}-{next(_numbers)}"
        self._threads = set(threading.enumerate())
        self._children = children()
        self._ended = resource.getrusage(resource.RUSAGE_CHILDREN)

    def found(self) -> list[str]:
        """Wait for the end of all that is new, and describe what does not end; processes are killed."""
        deadline = time.monotonic() + GRACE
        for thread in self._new_threads():
            thread.join(max(0.0, deadline - time.monotonic()))
        found = [f"thread {thread.name!r}" for thread in self._new_threads()]
        if resource.getrusage(resource.RUSAGE_CHILDREN) == self._ended and not self._new_children():
            return found  # it has started no process
        while (left := self._processes()) and time.monotonic() < deadline:
            time.sleep(0.01)
        for pid, command in left.items():
            found.append(f"process {pid}: {command}")
            _attempt(lambda pid=pid: os.kill(pid, signal.SIGKILL))
        return found

    def _new_threads(self) -> list[threading.Thread]:
        new = (thread for thread in threading.enumerate() if thread not in self._threads)
        return [thread for thread in new if not OF_LIBRARIES.fullmatch(thread.name) and not _compiles(thread)]

    def _new_children(self) -> set[int]:
        return children() - self._children - _of_pools()

    def _processes(self) -> dict[int, str]:
        """Return the commands of the test's processes by id: its children, and all that inherited its mark."""
        marked = {pid for pid in _all_processes() if self._started(pid)} - _of_pools() - {os.getpid()}
        commands = {pid: _command(pid) for pid in sorted(marked | self._new_children())}
        lasting = {os.getpid(), *_of_pools()}
        return {  # those that have ended have no command
            pid: command
            for pid, command in commands.items()
            if command and not (RENDERER in command and _parent(pid) in lasting)
        }

    def _started(self, pid: int) -> bool:
        environment = _attempt(Path(f"/proc/{pid}/environ").read_bytes) or b""
        return f"{_MARK}={self._mark}".encode() in environment.split(b"\0")


def children() -> set[int]:
    """Return the ids of the processes that this one has started; none where the system does not list them."""
    files = Path("/proc/self/task").glob("*/children")
    return {int(child) for file in files for child in (_attempt(file.read_text) or "").split()}


def _all_processes() -> list[int]:
    proc = Path("/proc")
    return [int(name) for name in os.listdir(proc) if name.isdecimal()] if proc.exists() else []


def _parent(pid: int) -> int | None:
    status = _attempt(Path(f"/proc/{pid}/status").read_text) or ""
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:")), None)


def _command(pid: int) -> str:
    """Return the command line of a process; empty if it has ended, also if nobody has waited for it."""
    return (_attempt(Path(f"/proc/{pid}/cmdline").read_bytes) or b"").replace(b"\0", b" ").decode(errors="replace").strip()


def _attempt(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (OSError, ProcessLookupError):  # the process has ended, or is another user's
        return None


def _of_pools() -> set[int]:
    """Return the ids of the processes of all pools, and of those that serve them and live as long as this process: the one
    that forks, and the one that multiprocessing starts with it."""
    servers = (forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid)
    return {pid for pid in (*servers, *gloo_pool.living) if pid is not None}
