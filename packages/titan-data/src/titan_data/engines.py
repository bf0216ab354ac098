"""Writes the parts of a tokenised dataset, in processes of this machine or in workers on the machines of a Ray cluster."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Final, Protocol

from titan_core.api import UserError
from titan_core.toolkit.plugin_files import load_plugin_files
from titan_core.toolkit.text import log_to_stderr
from titan_core.toolkit.worker_process import ENDED, end_now, worker_processes

WritePart = Callable[[int], int]
"""Writes the part with this number, and returns the number of corrupt records that it skipped. It can be pickled, and a part
may be written twice at the same time."""
_PAUSE: Final = 0.5
"""Seconds between two reports of progress."""
_RETRIES: Final = 5
"""How often Ray writes a part again whose worker or machine has died."""


@dataclass(frozen=True)
class Written:
    """A part has been written."""

    machine: str
    corrupt: int
    """Number of corrupt records that were skipped."""


class Engine(Protocol):
    """Runs the tasks of a tokenisation."""

    def run(self, write: WritePart, parts: Sequence[int]) -> Iterator[list[Written]]:
        """Write all ``parts``; yield those that have been finished since the last time, at least every half second.

        Raises:
            UserError: a part cannot be written. No task is running afterwards.
        """
        ...


@dataclass(frozen=True)
class LocalEngine:
    """Processes of this machine."""

    workers: int

    def run(self, write: WritePart, parts: Sequence[int]) -> Iterator[list[Written]]:  # noqa: D102
        pool = worker_processes(max(1, min(self.workers, len(parts))))
        try:
            futures = {pool.submit(write, part) for part in parts}
            while futures:
                done, futures = wait(futures, timeout=_PAUSE, return_when=FIRST_COMPLETED)
                yield [Written(platform.node(), future.result()) for future in done]
        except BrokenProcessPool:
            raise UserError.one("a worker", ENDED, "run the same command with fewer --workers to resume") from None
        finally:
            end_now(pool)  # after an error, workers are still running; their parts are rewritten on resume


class RayEngine:
    """All CPUs of a Ray cluster that is running: the one that ``RAY_ADDRESS`` names, or the one of this machine.

    Ray starts tasks again whose worker or machine has died.
    """

    def run(self, write: WritePart, parts: Sequence[int]) -> Iterator[list[Written]]:  # noqa: D102
        ray = _connected()
        try:
            task = ray.remote(num_cpus=1, max_retries=_RETRIES, scheduling_strategy="SPREAD")(_on_a_machine)
            own = {name: value for name, value in os.environ.items() if name.startswith("TITAN_")}
            waiting = [task.remote(write, part, os.getcwd(), own) for part in parts]
            while waiting:
                done, waiting = ray.wait(waiting, timeout=_PAUSE)
                yield [ray.get(reference) for reference in done]
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, UserError) else error from None
        except ray.exceptions.RayError as error:
            why = f"failed {_RETRIES + 1} times: {' '.join(str(error).split())[:300]}"
            raise UserError.one("a worker of the Ray cluster", why, "run the same command to resume") from None
        finally:
            ray.shutdown()  # the cluster ends the tasks of this command


def _connected() -> Any:
    """Return the module ``ray``, connected with a cluster.

    Raises:
        UserError: it is not installed, or no cluster answers.
    """
    where = "--engine ray"
    # Under `uv run`, Ray would copy the working folder to each machine and install its project there.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        import ray
    except ImportError:
        raise UserError.one(where, "Ray is not installed", "install titan-data[ray]") from None
    try:
        if address := os.environ.get("RAY_ADDRESS"):  # Ray itself would wait for minutes, and end the process
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address="auto", configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        why = f"no Ray cluster can be used: {' '.join(str(error).split()).partition('. ')[0][:300]}"
        fix = "run `ray start --head` here and `ray start --address` on the other machines, or set RAY_ADDRESS"
        raise UserError.one(where, why, fix) from None
    return ray


def _on_a_machine(write: WritePart, part: int, folder: str, variables: Mapping[str, str]) -> Written:
    """Write a part, on some machine of the cluster, with the working folder and variables of the command."""
    log_to_stderr()
    machine = platform.node()
    os.environ.update(variables)
    try:
        os.chdir(folder)
    except OSError as error:
        why = f"machine {machine} cannot enter it: {error.strerror or error}"
        fix = "run the command in a folder that all machines of the cluster share"
        raise UserError.one(folder, why, fix) from None
    load_plugin_files()
    return Written(machine, write(part))
