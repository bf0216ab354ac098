"""Processes that stay alive between tests, since importing torch costs each of them seconds."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT = 600.0
"""Seconds; sixteen processes on two cores take a minute to import torch alone."""


class GlooPool:
    """``run(n, function, ...)`` calls a module-level function in ``n`` processes, in torchrun's environment."""

    def __init__(self) -> None:
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def run(self, size: int, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        """The results of all ranks.

        Raises:
            RuntimeError: a rank raised; its traceback is the message.
        """
        while len(self._workers) < size:
            self._workers.append(_start())
        port = _free_port()
        for rank, (_, pipe) in enumerate(self._workers[:size]):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            pipe.send((environment, function, arguments, keywords))
        outcomes = []
        for rank, (_, pipe) in enumerate(self._workers[:size]):
            if not pipe.poll(TIMEOUT):
                self.close()
                raise RuntimeError(f"rank {rank} of {size} did not answer within {TIMEOUT} s")
            outcomes.append(pipe.recv())
        failures = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
        if failures:
            raise RuntimeError("\n".join(failures))
        return [result for _, result in outcomes]

    def close(self) -> None:
        """End all processes."""
        for process, pipe in self._workers:
            pipe.close()
            process.terminate()
            process.join()
        self._workers.clear()


def _start() -> tuple[multiprocessing.process.BaseProcess, Connection]:
    os.environ["OMP_NUM_THREADS"] = "1"  # inherited by the process that starts now
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
