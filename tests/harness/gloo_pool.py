"""Processes that stay alive between tests, forked from one that has imported torch: it costs seconds, and that only once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from torch.distributed import TCPStore

from titan_core.plugins.discovery import DISABLE_VARIABLE

TIMEOUT = 600.0
"""Seconds."""


GRACE = 10.0
"""Seconds that the other ranks have once one has failed."""

_context = multiprocessing.get_context("forkserver")
# Imports alone start no thread, so what is forked from them is whole.
_context.set_forkserver_preload(
    ["titan_core.train.trainer", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.checkpoint"]
)


class ProcessDied(RuntimeError):
    """A rank's process ended without an answer."""


class GlooPool:
    """``run(n, function, ...)`` calls a module-level function in ``n`` processes, in torchrun's environment."""

    def __init__(self, once_more: bool = False) -> None:
        """
        Args:
            once_more: whether a call whose process died, which is nothing that the function raised, is made once more in new
                processes, with a warning that says so.
        """
        self._once_more = once_more
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def run(self, size: int, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        """The results of all ranks.

        Raises:
            RuntimeError: a rank raised; its traceback is the message.
        """
        try:
            return self._run(size, function, *arguments, **keywords)
        except ProcessDied as died:
            if not self._once_more:
                raise
            warnings.warn(f"{function.__name__}: {died}; made once more in new processes", stacklevel=2)
        return self._run(size, function, *arguments, **keywords)

    def _run(self, size: int, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        while len(self._workers) < size:
            self._workers.append(_start())
        # The store is here, on a port that the system picks: one that is looked for first may be taken before it is used.
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
            pipe.send((environment, function, arguments, keywords))
        outcomes = self._outcomes(size)
        failures = [f"rank {rank}: {text}" for rank, (ok, text) in outcomes.items() if not ok]
        if failures:
            raise RuntimeError("\n".join(failures))
        return [outcomes[rank][1] for rank in range(size)]

    def _outcomes(self, size: int) -> dict[int, tuple[bool, Any]]:
        """What each rank sends. Where one has failed, others that wait for it are not waited for."""
        rank_of = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[:size])}
        outcomes: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + TIMEOUT
        while len(outcomes) < size:
            waiting = [pipe for pipe, rank in rank_of.items() if rank not in outcomes]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    outcomes[rank_of[pipe]] = pipe.recv()
                except EOFError:
                    # The next test gets new processes.
                    process, rank = self._workers[rank_of[pipe]][0], rank_of[pipe]
                    process.join(10)
                    how = f"the process of rank {rank} has died (exit code {process.exitcode})"
                    self.close()
                    told = [text for ok, text in outcomes.values() if not ok]
                    raise ProcessDied("\n".join([how, *told])) from None
            if not ready:
                missing = sorted(set(range(size)) - set(outcomes))
                self.close()
                failed = [text for ok, text in outcomes.values() if not ok]
                raise RuntimeError("\n".join([f"rank(s) {missing} of {size} did not answer in time", *failed]))
            if not all(ok for ok, _ in outcomes.values()):
                deadline = min(deadline, time.monotonic() + GRACE)
        return outcomes

    def close(self) -> None:
        """End all processes."""
        for process, pipe in self._workers:
            pipe.close()
            process.terminate()
        deadline = time.monotonic() + GRACE
        for process, _ in self._workers:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()  # a rank that trains finishes its step first on SIGTERM, and may wait for another one
            process.join()
        self._workers.clear()


def _start() -> tuple[multiprocessing.process.BaseProcess, Connection]:
    os.environ["OMP_NUM_THREADS"] = "1"  # inherited by the process that starts now
    here, there = _context.Pipe()
    process = _context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    there.close()
    return process, here


def _serve(pipe: Connection) -> None:
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        try:
            environment, function, arguments, keywords = pickle.loads(message)
            os.environ.update(environment)
            pipe.send((True, function(*arguments, **keywords)))
        except BaseException:  # noqa: BLE001 - whatever it is, the test that asked shall see it
            pipe.send((False, traceback.format_exc()))
