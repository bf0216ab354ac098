"""One attempt: the processes of this machine's ranks, from their start to their end."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from titan_core.toolkit.launching import JOB_KEY, Outcome
from titan_launch.ranks.progress import Progress, StepLimits, read_progress

LOOK_SECONDS = 1.0
"""How often to look for steps that take too long."""
_KILLED_SECONDS = 30.0
"""How long a killed process may take to end. One that waits for a device may never do so."""


class Ended(enum.Enum):
    """How an attempt ended on this machine."""

    COMPLETE = enum.auto()
    INTERRUPTED = enum.auto()
    FAILED = enum.auto()
    """For good."""
    RETRIED = enum.auto()
    """It failed, and another one follows."""
    FOLLOWED = enum.auto()
    """The ranks ended only because of another machine. Whether that counts as a failure is known once the machines meet."""
    OVERTAKEN = enum.auto()
    """Machines have joined or left."""


class Attempt:
    """The ranks that were started together. Each leads a session, so that signals reach what it has started."""

    def __init__(
        self,
        command: Sequence[str],
        environments: Mapping[int, Mapping[str, str]],
        streams: Mapping[int, tuple[int, int]],
        folder: Path,
        inherited: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        """Start a process for each rank.

        Args:
            command: of all ranks.
            environments: of each rank, beside that of this process.
            streams: descriptors of stdout and stderr of each rank.
            folder: where the ranks record their outcomes and their progress.
            inherited: descriptors that a rank inherits.
        """
        self._folder = folder
        self._looked = 0.0
        self.began = time.time()
        """Seconds since the epoch."""
        self.hung: dict[int, float] = {}
        """Ranks that were killed because their step took too long, and its seconds."""
        self.is_over = False
        """Whether the ranks have ended for good: an interrupt then is one of the launcher."""
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
    def ranks(self) -> set[int]:
        """The ranks of this machine."""
        return set(self._processes)

    @property
    def ended(self) -> dict[int, int]:
        """The exit status of each rank that has ended, negative for a signal."""
        return {rank: status for rank, process in self._processes.items() if (status := process.poll()) is not None}

    @property
    def outcomes(self) -> dict[int, Outcome]:
        """The outcomes that ranks have recorded, by rank."""
        found: dict[int, Outcome] = {}
        for file in sorted(self._folder.glob("rank-*.json")):
            values = json.loads(file.read_text(encoding="utf-8"))
            outcome = Outcome(**{**values, "problems": tuple(values["problems"])})
            found[outcome.rank] = outcome
        return found

    @property
    def progress(self) -> dict[int, Progress]:
        """How far the ranks that have begun to train are."""
        return read_progress(self._folder)

    @property
    def begun(self) -> int:
        """The step after which the attempt started; 0 if it is unknown."""
        return min((one.begun for one in self.progress.values()), default=0)

    @property
    def completed(self) -> int:
        """The last step that a rank has completed; 0 if it is unknown."""
        return max((one.completed for one in self.progress.values()), default=0)

    def kill_hung(self, limits: StepLimits) -> None:
        """Kill the ranks if one has been in the same step for too long. Collectives have a time limit of their own, so that
        this concerns ranks of which none waits in one."""
        now = time.monotonic()
        if self.hung or now < self._looked + LOOK_SECONDS:
            return
        self._looked = now
        self.hung = limits.exceeded(self.progress, now)
        if self.hung:
            self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the ranks. Safe in a signal handler: a rank that was reaped gets none, because another process
        may have its number."""
        for process in self._processes.values():
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                os.kill(process.pid, number)

    def close(self, number: signal.Signals, seconds: float) -> dict[int, int]:
        """Send a signal to the ranks that run and to what they have started, and SIGKILL to those that are left after
        ``seconds``; return the exit status of each, negative for a signal."""
        self._send_to_groups(number)
        self._wait(seconds)
        self._send_to_groups(signal.SIGKILL)
        self._wait(_KILLED_SECONDS)
        return self.ended

    def _send_to_groups(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                os.killpg(process.pid, number)

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
