"""The processes of this machine's ranks, in one attempt. Each leads a session, so that signals reach what it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from titan_core.toolkit.launching import JOB_KEY

_KILLED_SECONDS = 30.0
"""How long a killed process may take to end. One that waits for a device may never do so."""


class RankProcesses:
    """The ranks that were started together. Whatever ends them, each is reaped by :meth:`close` only."""

    def __init__(
        self,
        command: Sequence[str],
        environments: Mapping[int, Mapping[str, str]],
        streams: Mapping[int, tuple[int, int]],
        inherited: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        """Start a process for each rank.

        Args:
            command: of all ranks.
            environments: of each rank, beside that of this process.
            streams: descriptors of stdout and stderr of each rank.
            inherited: descriptors that a rank inherits.
        """
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        own = {name: value for name, value in os.environ.items() if name != JOB_KEY}  # ranks need not know it
        try:
            for rank, environment in environments.items():
                out, err = streams[rank]
                self._processes[rank] = subprocess.Popen(
                    command, env={**own, **environment}, stdout=out, stderr=err, start_new_session=True,
                    pass_fds=inherited.get(rank, ()),
                )  # fmt: skip
        except OSError:
            self.close(signal.SIGKILL, 0.0)
            raise

    @property
    def pids(self) -> dict[int, int]:
        """The process ids by rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def close(self, number: signal.Signals, seconds: float) -> dict[int, int]:
        """Send a signal to the ranks that run, and SIGKILL to those that are left after ``seconds``; return the exit status
        of each, negative for a signal."""
        for process in self._processes.values():
            _send(process, number)
        self._wait(seconds)
        for process in self._processes.values():
            _send(process, signal.SIGKILL)
        self._wait(_KILLED_SECONDS)
        return {rank: process.returncode for rank, process in self._processes.items() if process.returncode is not None}

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))


def _send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a rank and to what it has started, unless it has ended."""
    if process.poll() is None:
        os.killpg(process.pid, number)
