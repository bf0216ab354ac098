"""After which failures the launcher restarts the ranks, how often, and when. Imports no torch.

A failure that a restart would only repeat ends the job. Other failures are followed by at most ``--max-restarts`` restarts
in a row: an attempt that gets further than those before it clears the count, so that a job of a month does not end with its
fourth unrelated fault. The first restart of a row is immediate; before each further one, the wait doubles.
"""

from __future__ import annotations

import signal
from collections.abc import Collection
from dataclasses import dataclass

from titan_core.toolkit.errors import (
    EXIT_BAD_DEVICE,
    EXIT_DATA_ENDED,
    EXIT_INTERRUPTED,
    EXIT_NUMERICS,
    EXIT_OUT_OF_MEMORY,
    EXIT_PREEMPTED,
    EXIT_USER_ERROR,
)

GRACE_SECONDS = 10.0
"""How long the other ranks may take to exit and to record why, once one has failed."""
SAVE_SECONDS = 120
"""Default of ``--grace``: the same, once one has stopped cleanly (SIGTERM, end of the data). The others may still be writing
checkpoints."""
KILLED_SECONDS = 3.0
"""The same, once a signal has ended one: the cause is known, and no checkpoint can be completed without that rank."""
RECORDED_SECONDS = 1.0
"""The same, if each of the others has recorded that it lost a rank."""

_FINAL = {
    EXIT_USER_ERROR: "a restart would find the same mistake",
    EXIT_DATA_ENDED: "there is no more data",
    EXIT_NUMERICS: "a restart would meet the same numbers",
    EXIT_INTERRUPTED: "the job was interrupted",
    EXIT_BAD_DEVICE: "a restart would compute on the same device",
}
"""Exit statuses after which the ranks are not restarted, and why."""
_ENDED_CLEANLY = {0, EXIT_PREEMPTED, EXIT_DATA_ENDED}
_FATAL = {-number for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)}
"""Signals that end only the rank at fault. NCCL aborts ranks that have lost another; SIGTERM may come before a handler."""


@dataclass(frozen=True)
class RestartLimits:
    """The options of the launcher."""

    most: int = 0
    """``--max-restarts``."""
    wait: float = 5.0
    """``--restart-wait``: seconds before the second restart in a row."""
    longest_wait: float = 300.0
    """``--restart-wait-max``: seconds."""


@dataclass(frozen=True)
class Decision:
    """What follows a failure."""

    restarts: bool
    wait: float = 0.0
    """Seconds before the restart."""
    left: int = 0
    """Number of further restarts if the next attempt gets no further than this one."""
    why: str = ""
    """Why there is no restart, unless none is left."""


class RestartPolicy:
    """Counts the restarts of one job."""

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self._used = 0
        self._furthest: int | None = None

    def after(self, status: int, begun: int, completed: int) -> Decision:
        """Decide what follows an attempt that failed.

        Args:
            status: exit status of the job if it ends now.
            begun: the step after which the attempt started.
            completed: the last step that it completed; 0 if it is unknown.
        """
        if self._furthest is not None and completed > self._furthest:
            self._used = 0
        self._furthest = max(completed, self._furthest or 0)
        why = _FINAL.get(status, "")
        if status == EXIT_OUT_OF_MEMORY and completed <= begun:
            why = "it needs more memory than there is for its first step"
        if why or self._used >= self._limits.most:
            return Decision(False, why=why if self._limits.most else "")
        self._used += 1
        limits = self._limits
        wait = 0.0 if self._used == 1 else min(limits.longest_wait, limits.wait * 2.0 ** min(self._used - 2, 60))
        return Decision(True, wait, limits.most - self._used)


def patience(ended: Collection[int], all_recorded: bool, grace: float) -> float:
    """Return the seconds, from the first failure on, that the remaining ranks may take to end.

    Args:
        ended: exit statuses of the ranks that have ended, negative for a signal.
        all_recorded: whether each of the remaining ranks has recorded its own failure.
        grace: ``--grace``.
    """
    if set(ended) <= _ENDED_CLEANLY:
        return grace
    if _FATAL & set(ended):
        return RECORDED_SECONDS if all_recorded else KILLED_SECONDS
    return GRACE_SECONDS
