"""Why the ranks of a machine failed: the first cause, and the others."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from titan_core.toolkit.errors import EXIT_DATA_ENDED, EXIT_LOST_PEER, EXIT_PREEMPTED
from titan_core.toolkit.launching import Outcome, report_lines
from titan_core.toolkit.text import ranks
from titan_launch.progress import Progress

_MILLISECONDS = re.compile(r"\b(\d+) ?(?:ms|milliseconds)\b")


@dataclass(frozen=True)
class Failure:
    """Why an attempt failed, as far as this machine can see."""

    status: int
    """Exit status of the job."""
    lines: tuple[str, ...]
    """Lines to print, the first cause last."""


def read_outcomes(folder: Path) -> dict[int, Outcome]:
    """Return the outcomes recorded in ``folder``, by rank."""
    found: dict[int, Outcome] = {}
    for file in sorted(folder.glob("rank-*.json")):
        values = json.loads(file.read_text(encoding="utf-8"))
        outcome = Outcome(**{**values, "problems": tuple(values["problems"])})
        found[outcome.rank] = outcome
    return found


def failure_of(
    statuses: dict[int, int],
    local_ranks: set[int],
    outcomes: dict[int, Outcome],
    logs: dict[int, str],
    diagnose: Callable[[], str | None],
    progress: Mapping[int, Progress] = MappingProxyType({}),
    hung: Mapping[int, float] = MappingProxyType({}),
) -> Failure:
    """Return the first cause of a failure, and the other causes.

    Args:
        statuses: exit statuses of the ranks that this agent did not kill.
        local_ranks: the ranks of this machine.
        outcomes: the recorded outcomes, of ranks that failed and of others.
        logs: the logs of this machine's ranks.
        diagnose: returns what observers recorded about the failure, if anything.
        progress: how far the ranks of this machine were.
        hung: the ranks that this agent killed because their step took too long, and its seconds.
    """
    failed = {rank: outcome for rank, outcome in outcomes.items() if outcome.problems}
    step = max([*(one.step for one in outcomes.values()), *(one.started for one in progress.values())], default=0)
    during = f" in step {step}" if step else ""
    killed: dict[int, list[int]] = {}
    exited: dict[int, list[int]] = {}
    for rank, status in sorted(statuses.items()):
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
        why = " (out of memory?)" if status == -signal.SIGKILL else ""
        line = f"error: {ranks(numbers)} {_was(numbers)} killed by {_name(-status)}{during}{why}; see {logs[numbers[0]]}"
        lines.append((line, 128 - status))
    causes = [outcome for outcome in failed.values() if not outcome.follows]
    lines += [(line, _status_of(causes, statuses)) for line in report_lines(causes)]
    for status, numbers in exited.items():
        line = f"error: {ranks(numbers)} exited with status {status}{during} and recorded no reason; see {logs[numbers[0]]}"
        lines.append((line, status))
    if aborted:
        line = f"error: {ranks(aborted)} {_was(aborted)} killed by SIGABRT{during}; see {logs[aborted[0]]}"
        lines.append((line, 128 + signal.SIGABRT))
    found = diagnose() if not causes else None
    if not lines and hung:
        line = f"error: {ranks(hung)} {_was(list(hung))} killed{during}, which had taken {max(hung.values()):.0f} s"
        lines.append((line, EXIT_LOST_PEER))
    if not lines:
        line = f"error: {_lost(local_ranks - set(statuses), failed, during, found is None)}"
        lines.append((line, EXIT_LOST_PEER))
    if found is not None:
        line, status = lines[0]
        lines[0] = (f"{line}; {found}", status)
    return Failure(lines[0][1], tuple(line for line, _ in reversed(lines)))


def _lost(silent: set[int], failed: dict[int, Outcome], during: str, shows_log: bool) -> str:
    """Describe a failure in which every failed rank was waiting for another.

    Args:
        silent: ranks of this machine that have not ended.
        shows_log: whether to name the log of the first rank that failed.
    """
    first = min(failed.values(), key=lambda outcome: outcome.time)
    waited = _MILLISECONDS.search(first.problems[0])
    duration = f" for {int(waited[1]) / 1000:g} s" if waited else ""
    missing = ranks(silent) if silent else "a rank on another machine"
    verb = "have" if len(silent) > 1 else "has"
    line = f"{missing} {verb} not answered{duration}{during}"
    if not first.log or not shows_log:
        return line
    return f"{line}; the traceback of {ranks([first.rank])}, which waited for it, is in {first.log}"


def _status_of(causes: list[Outcome], statuses: dict[int, int]) -> int:
    first = min(causes, key=lambda outcome: outcome.time)
    return first.status or abs(statuses.get(first.rank, 1)) or 1


def _was(numbers: list[int]) -> str:
    return "was" if len(numbers) == 1 else "were"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
