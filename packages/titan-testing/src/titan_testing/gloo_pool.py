"""A pool of processes that stay alive between tests. They are forked from one that has imported torch, because the import
takes seconds."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TextIO
from unittest.mock import patch

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from titan_core.plugins.discovery import DISABLE_VARIABLE
from titan_testing import PATIENCE

GRACE = 10.0
"""Seconds that the other ranks may take once one has failed."""
ASK = signal.SIGRTMIN + 2
"""A signal that no package uses: a process writes where its threads are."""

_TASKS = "/proc/self/task"  # Linux's; elsewhere nothing is collected early
_THREADS = 40

_context = multiprocessing.get_context("forkserver")
# These imports start no thread, so forking after them is safe.
_context.set_forkserver_preload(
    ["titan_core.loop.training", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.checkpoint"]
)


class GlooPool:
    """Calls a module-level function in ``n`` processes with torchrun's environment: ``run(n, function, ...)``."""

    def __init__(self, stacks: bool = False) -> None:
        """
        Args:
            stacks: whether the error has the stacks of a process that crashed. Otherwise the processes leave Python's fault
                handler to what they call.
        """
        self._stacks = stacks
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def run(self, size: int, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        """Return the results of all ranks.

        Raises:
            RuntimeError: a rank raised, and the message is its traceback; or its process died.
        """
        while len(self._workers) < size:
            self._workers.append(_start(self._stacks))
        # The store listens on a port chosen by the system: a free port found beforehand may be taken before it is used.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank, (_, pipe) in enumerate(self._workers[:size]):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                DISABLE_VARIABLE: os.environ.get(DISABLE_VARIABLE, ""),
            }
            pipe.send_bytes(pickle.dumps((environment, sys.path, function, arguments, keywords)))
        outcomes = self._outcomes(size)
        failures = [f"rank {rank}: {text}" for rank, (ok, text) in outcomes.items() if not ok]
        if failures:
            raise RuntimeError("\n".join(failures))
        return [outcomes[rank][1] for rank in range(size)]

    def _outcomes(self, size: int) -> dict[int, tuple[bool, Any]]:
        """Return the outcome of each rank. Once one has failed, the others have only :data:`GRACE` seconds left."""
        rank_of = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[:size])}
        outcomes: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + PATIENCE
        while len(outcomes) < size:
            waiting = [pipe for pipe, rank in rank_of.items() if rank not in outcomes]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    outcomes[rank_of[pipe]] = pipe.recv()
                except EOFError:
                    # Closing the pool gives the next test new processes.
                    process, rank = self._workers[rank_of[pipe]][0], rank_of[pipe]
                    process.join(10)
                    died = f"the process of rank {rank} has died (exit code {process.exitcode})"
                    if process.pid is not None and (stacks := _stacks_of(process.pid)).exists():
                        written = stacks.read_text(encoding="utf-8", errors="replace")
                        died += f"\n{written or 'its fault handler could write nothing'}\n{_crashes_in_kernel_log()}"
                    self.close()
                    failed = [text for ok, text in outcomes.values() if not ok]
                    raise RuntimeError("\n".join([died, *failed])) from None
            if not ready:
                missing = sorted(set(range(size)) - set(outcomes))
                waiting_at = self._stacks_now(missing)
                self.close()
                failed = [text for ok, text in outcomes.values() if not ok]
                late = f"rank(s) {missing} of {size} did not answer in time"
                raise RuntimeError("\n".join([late, *failed, *waiting_at]))
            if not all(ok for ok, _ in outcomes.values()):
                deadline = min(deadline, time.monotonic() + GRACE)
        return outcomes

    def _stacks_now(self, ranks: Iterable[int]) -> list[str]:
        """Return where all threads of the ranks are. What they wait for may be in another rank, so each one is shown, but
        the same stack once."""
        if not self._stacks:
            return []
        pids = {rank: self._workers[rank][0].pid for rank in ranks}
        for pid in pids.values():
            if pid is not None:
                os.kill(pid, ASK)
        time.sleep(1.0)  # a process that waits in a system call writes its stacks at once
        at: dict[str, list[int]] = {}
        for rank, pid in pids.items():
            if pid is not None:
                for stack in _threads(_stacks_of(pid).read_text(encoding="utf-8", errors="replace")):
                    at.setdefault(stack, []).append(rank)
        # Main threads first: their stacks are the longest.
        return [f"rank(s) {at[stack]}: {stack}" for stack in sorted(at, key=len, reverse=True)]

    def close(self) -> None:
        """End all processes."""
        for process, pipe in self._workers:
            pipe.close()
            process.terminate()
        deadline = time.monotonic() + GRACE
        for process, _ in self._workers:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()  # on SIGTERM, a rank in training first finishes its step, and may wait for another rank
            process.join()
            living.discard(process.pid)
            if process.pid is not None:
                _stacks_of(process.pid).unlink(missing_ok=True)
        self._workers.clear()


living: set[int | None] = set()
"""Ids of the processes of all pools that are open."""


def _stacks_of(pid: int) -> Path:
    """Return the file with the stacks of all threads of a process that a signal has ended."""
    return Path(tempfile.gettempdir()) / f"titan-gloo-pool-{pid}.txt"


def _crashes_in_kernel_log() -> str:
    """Return the latest lines of the kernel about processes that a signal ended without a handler, as where a thread has no
    stack left. They name the library, and are all that is left of such a process. Empty where the log may not be read."""
    if (dmesg := shutil.which("dmesg")) is None:
        return ""
    log = subprocess.run([dmesg], capture_output=True, text=True, errors="replace", check=False).stdout
    return "\n".join([line for line in log.splitlines() if "segfault" in line or "traps:" in line][-3:])


def _threads(written: str) -> list[str]:
    """Return the stack of each thread that the fault handler wrote, in one line, the most recent call first."""
    stacks = re.split(r"^(?:Current t|T)hread .*\n", written, flags=re.MULTILINE)[1:]
    frames = [re.findall(r'File "([^"]*)", line (\d+) in (.*)', stack) for stack in stacks]
    return [" < ".join(f"{function} ({Path(file).name}:{line})" for file, line, function in found) for found in frames]


def _start(stacks: bool) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    here, there = _context.Pipe()
    process = _context.Process(target=_serve, args=(there, stacks), daemon=True)
    with patch.dict(os.environ, OMP_NUM_THREADS="1"):  # inherited by the new process
        process.start()
    living.add(process.pid)
    there.close()
    return process, here


def _serve(pipe: Connection, stacks: bool) -> None:
    file: TextIO | None = None
    if stacks:
        _stacks_of(os.getpid()).unlink(missing_ok=True)  # of an earlier process with this id
        file = _stacks_of(os.getpid()).open("x", encoding="utf-8")  # follows no link
    if file is not None:
        faulthandler.enable(file)
    from titan_core.torch_private import one_worker_per_gloo_group  # imported before the fork, and slow elsewhere

    with one_worker_per_gloo_group():  # as in a job, because tests make groups without one too
        _answer(pipe, file)


def _answer(pipe: Connection, file: TextIO | None) -> None:
    before = dict(os.environ)
    while True:
        if file is not None:
            faulthandler.enable(file)  # each time: what was called may have disabled it
            faulthandler.register(ASK, file)
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        try:
            # The path is the caller's now, not that of the test that started this process, nor one that a call has left.
            environment, sys.path[:], function, arguments, keywords = pickle.loads(message)
            os.environ.update(environment)
            answer = pickle.dumps((True, function(*arguments, **keywords)))
        except BaseException:  # noqa: BLE001 - the calling test must see any exception
            answer = pickle.dumps((False, traceback.format_exc()))
        finally:
            # A variable that a call leaves would hold for later calls on some ranks only: those that took part in this one.
            restore_environment(before)
            release_models()
        # Not `send`, with which torch passes a file descriptor for each tensor. It stays open as long as the tensor lives.
        pipe.send_bytes(answer)


def release_models() -> None:
    """Collect the models that jobs have left, once many threads are theirs.

    A model is cyclic garbage and holds process groups. Each of them has two threads, one of which wakes up a hundred times
    a second: with 100 groups in each process of a run, half of the processors' time is spent on that. A collection takes
    0.25 s, and Python starts none by itself for long: :class:`~titan_testing.jobs.JobRecorder` freezes what it would walk.
    """
    if os.path.isdir(_TASKS) and len(os.listdir(_TASKS)) > _THREADS:
        gc.collect()


def restore_environment(variables: dict[str, str]) -> None:
    """Make ``variables`` the environment of this process. Only what differs is set: other threads may be reading."""
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    for name, value in variables.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
