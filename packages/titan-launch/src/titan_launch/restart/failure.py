"""Why the ranks of a machine failed: the first cause, and the others."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from titan_core.api import UserError
from titan_core.toolkit.errors import EXIT_DATA_ENDED, EXIT_LOST_PEER, EXIT_PREEMPTED
from titan_core.toolkit.launching import Outcome, report_lines
from titan_core.toolkit.text import ranks
from titan_launch.meeting.machines import blamed
from titan_launch.meeting.rendezvous import RendezvousClosed, RendezvousError, root_cause
from titan_launch.ranks.progress import Progress

_MILLISECONDS = re.compile(r"\b(\d+) ?(?:ms|milliseconds)\b")


@dataclass(frozen=True)
class Failure:
    """Why an attempt failed, as far as this machine can see."""

    status: int
    """Exit status of the job."""
    lines: tuple[str, ...]
    """Lines to print, the first cause last."""


@dataclass(frozen=True)
class Evidence:
    """What the ranks of this machine left behind when their attempt failed."""

    exited: Mapping[int, int]
    """Exit statuses of the ranks that the launcher did not kill, negative for a signal."""
    logs: Mapping[int, str]
    """The log of each rank."""
    outcomes: Mapping[int, Outcome]
    """What ranks recorded, those that failed and others."""
    progress: Mapping[int, Progress] = field(default_factory=dict)
    """How far the ranks were."""
    hung: Mapping[int, float] = field(default_factory=dict)
    """Ranks whose step took too long, so that the launcher killed all, and its seconds."""

    @property
    def failed(self) -> dict[int, Outcome]:
        """The outcomes of the ranks that recorded a failure."""
        return {rank: outcome for rank, outcome in self.outcomes.items() if outcome.problems}

    @property
    def causes(self) -> list[Outcome]:
        """The recorded failures that are not those of another rank."""
        return [outcome for outcome in self.failed.values() if not outcome.follows]

    @property
    def is_interrupted(self) -> bool:
        """Whether an interrupt has ended a rank."""
        return any(status in (-signal.SIGINT, 128 + signal.SIGINT) for status in self.exited.values())

    def follows(self, machine_left: bool) -> bool:
        """Whether the ranks ended only because of another machine. Ranks that stop in order follow a SIGTERM that another
        machine received; a rank that hangs may wait for another machine only if one has left."""
        if self.hung:
            return False
        peers = all(
            status in (0, EXIT_PREEMPTED, -signal.SIGABRT) or (rank in self.outcomes and self.outcomes[rank].follows)
            for rank, status in self.exited.items()
        )
        orderly = set(self.exited.values()) <= {0, EXIT_PREEMPTED}
        return orderly or (peers and (self.logs.keys() == self.exited.keys() or machine_left))

    def first_failure(self, noticed: float, status: int) -> float:
        """Return when the first rank failed, as far as it is known.

        Args:
            noticed: when the launcher saw it. All times are in seconds since the epoch.
            status: exit status of the failure.
        """
        times = [outcome.time for outcome in self.failed.values()]
        if status == EXIT_LOST_PEER:  # whatever rank is at fault, its last progress is the oldest
            times += [one.time + time.time() - time.monotonic() for one in self.progress.values()]
        return min([noticed, *times])

    def with_logs(self, moved: Mapping[str, str]) -> Evidence:
        """Return the same, after logs have moved.

        Args:
            moved: old and new paths.
        """
        logs = {rank: moved.get(log, log) for rank, log in self.logs.items()}
        outcomes = {rank: replace(one, log=moved.get(one.log, one.log)) for rank, one in self.outcomes.items()}
        return replace(self, logs=logs, outcomes=outcomes)


_KILLED: dict[int, str] = {
    signal.SIGKILL: " (out of memory?)",
    signal.SIGBUS: " (a file of the dataset was truncated while it was read, its disk has failed, or /dev/shm is full?)",
}
"""What may have sent a signal."""


def failure_of(found: Evidence, diagnose: Callable[[], str | None]) -> Failure:
    """Return the first cause of a failure, and the other causes.

    Args:
        diagnose: returns what observers recorded about the failure, if anything.
    """
    failed, logs, causes = found.failed, found.logs, found.causes
    started = [*(one.step for one in found.outcomes.values()), *(one.started for one in found.progress.values())]
    step = max(started, default=0)
    during = f" in step {step}" if step else ""
    killed: dict[int, list[int]] = {}
    exited: dict[int, list[int]] = {}
    for rank, status in sorted(found.exited.items()):
        if rank not in failed:
            (killed if status < 0 else exited).setdefault(status, []).append(rank)
    if set(exited) == {EXIT_PREEMPTED} and not killed and not failed:
        line = f"{ranks(exited[EXIT_PREEMPTED])} stopped{during} on SIGTERM; the job can be restarted"
        return Failure(EXIT_PREEMPTED, (line,))
    if set(exited) == {EXIT_DATA_ENDED} and not killed and not failed:
        return Failure(EXIT_DATA_ENDED, ("the data ended before the last step",))
    lines: list[tuple[str, int]] = []
    # From the most certain cause to the least. A signal points at the rank itself, except SIGABRT: NCCL's watchdog aborts a
    # rank that has lost another.
    aborted = killed.pop(-signal.SIGABRT, [])
    for status, numbers in killed.items():
        why = _KILLED.get(-status, "")
        line = f"error: {ranks(numbers)} {_was(numbers)} killed by {_name(-status)}{during}{why}; see {logs[numbers[0]]}"
        lines.append((line, 128 - status))
    lines += [(line, _status_of(causes, found.exited)) for line in report_lines(causes)]
    for status, numbers in exited.items():
        line = f"error: {ranks(numbers)} exited with status {status}{during} and recorded no reason; see {logs[numbers[0]]}"
        lines.append((line, status))
    if aborted:
        line = f"error: {ranks(aborted)} {_was(aborted)} killed by SIGABRT{during}; see {logs[aborted[0]]}"
        lines.append((line, 128 + signal.SIGABRT))
    diagnosis = diagnose() if not causes else None
    if not lines and found.hung:
        taken = max(found.hung.values())
        line = f"error: {ranks(found.hung)} {_was(list(found.hung))} killed{during}, which had taken {taken:.0f} s"
        lines.append((line, EXIT_LOST_PEER))
    if not lines:
        line = f"error: {_lost(set(logs) - set(found.exited), failed, during, diagnosis is None)}"
        lines.append((line, EXIT_LOST_PEER))
    if diagnosis is not None:
        line, status = lines[0]
        lines[0] = (f"{line}; {diagnosis}", status)
    return Failure(lines[0][1], tuple(line for line, _ in reversed(lines)))


def failure_elsewhere(record: Mapping[str, Any] | None, own: Failure | None, retried: bool) -> Failure | None:
    """Return why the job has ended on the other machines; ``None`` if it is complete.

    Args:
        record: what they reported.
        own: why the last attempt failed on this machine, if it did.
        retried: whether this machine was to start its ranks again.
    """
    if record is None:
        return own or Failure(EXIT_LOST_PEER, ("error: the job has ended on the other machines, and none says why",))
    if not record["status"]:
        return None
    return own if retried else Failure(record["status"], (f"error: {blamed(record)}",))


def loss_of_machines(error: RendezvousError, own: Failure | None, endpoint: str) -> Failure:
    """Return why this machine has lost the others after its ranks were started. The options were right: the machine where
    all meet has ended, the others do not come back, or the job is over.

    Args:
        own: why the last attempt failed on this machine, if it did.
    """
    closed = isinstance(error, RendezvousClosed)
    if closed and own is not None:
        line = f"{own.lines[-1]}; not restarted, because the job has ended on another machine"
        return Failure(own.status, (line,))
    if closed:
        why = "the job has ended on another machine, whose output says why"
    elif isinstance(error.__cause__, UserError):  # the rendezvous of an elastic job has not returned
        why = str(error.__cause__)
    else:
        why = f"--rdzv-endpoint {endpoint}: the rendezvous is lost ({root_cause(error)})"
        why += "; start titan again here, and on the machine that hosts it"
    return Failure(EXIT_LOST_PEER, (f"error: {why}",))


def _lost(silent: set[int], failed: dict[int, Outcome], during: str, shows_log: bool) -> str:
    """Describe a failure in which every failed rank was waiting for another.

    Args:
        silent: ranks of this machine that have not ended.
        shows_log: whether to name the log of the first rank that failed.
    """
    first = min(failed.values(), key=lambda outcome: outcome.time)
    if first.problems[0].startswith("stopped: "):  # it knows which other rank is to blame
        return first.problems[0]
    waited = _MILLISECONDS.search(first.problems[0])
    duration = f" for {int(waited[1]) / 1000:g} s" if waited else ""
    missing = ranks(silent) if silent else "a rank on another machine"
    verb = "have" if len(silent) > 1 else "has"
    line = f"{missing} {verb} not answered{duration}{during}"
    if not first.log or not shows_log:
        return line
    return f"{line}; the traceback of {ranks([first.rank])}, which waited for it, is in {first.log}"


def _status_of(causes: list[Outcome], statuses: Mapping[int, int]) -> int:
    first = min(causes, key=lambda outcome: outcome.time)
    return first.status or abs(statuses.get(first.rank, 1)) or 1


def _was(numbers: list[int]) -> str:
    return "was" if len(numbers) == 1 else "were"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
