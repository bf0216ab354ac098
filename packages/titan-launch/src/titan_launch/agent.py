"""The processes of this machine's ranks, watched by torch's elastic agent; what it lacks for a person is added here."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs

from titan_core.api.errors import EXIT_PREEMPTED, UserError
from titan_core.api.launcher import Outcome, announce_interrupt, release_terminal, report_lines
from titan_core.api.tools.rank_names import ranks
from titan_launch.torch_private import ExtensibleAgent

GRACE_SECONDS = 10.0
"""How long the other ranks have to end by themselves, and to write down why, once one has failed."""
ORDERLY_SECONDS = 30.0
"""The same, once one has stopped in good order (SIGTERM): others may still be writing."""

_MILLISECONDS = re.compile(r"\b(\d+) ?(?:ms|milliseconds)\b")


@dataclass(frozen=True)
class Failure:
    """Why an attempt failed, as far as this machine knows."""

    status: int
    """The exit status that says so."""
    lines: tuple[str, ...]
    """What is to be printed, the first cause last."""


class JobInterrupted(Exception):
    """A person has interrupted the ranks, which have ended."""


class RankAgent(ExtensibleAgent):
    """Forwards interrupts to the ranks and waits for them, prints why an attempt failed and that another one begins."""

    def __init__(
        self,
        spec: WorkerSpec,
        machines: tuple[int, int],
        folder: Path,
        diagnose: Callable[[float], str | None],
    ) -> None:
        """
        Args:
            machines: how many take part, at least and at most.
            folder: for the ranks' outcomes and torch's own files.
            diagnose: what observers have found out about ranks that lost another, of an attempt that began at a time.
        """
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(folder / "torch")))
        self._machines, self._diagnose = machines, diagnose
        self._outcomes = folder / "outcomes"
        self._attempt, self._attempts = 1, spec.max_restarts + 1
        self._began = 0.0
        self._failed_at: float | None = None
        self._living: dict[int, int] = {}  # process id by rank
        self.interrupts = 0
        """How many interrupts this process has had since ranks were started."""
        self.failure: Failure | None = None
        """Of the last attempt."""

    @property
    def outcomes(self) -> dict[int, Outcome]:
        """What the ranks of the last attempt have left, by rank."""
        return read_outcomes(self._outcomes)

    @property
    def outcomes_folder(self) -> Path:
        """Where ranks leave them."""
        return self._outcomes

    def start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start this machine's ranks.

        Raises:
            UserError: more or fewer machines have met than should.
        """
        least, most = self._machines
        size = worker_group.group_world_size or 0
        if not least <= size <= most:
            wanted = str(least) if least == most else f"{least}:{most}"
            why = f"{size} machine(s) met at the rendezvous"
            raise UserError.one(f"--nnodes {wanted}", why, "start titan with the same --nnodes on every machine")
        if self._began and self.failure is None:
            _print("machines have joined or left; the ranks are started again")
        self.failure = self._failed_at = None
        shutil.rmtree(self._outcomes, ignore_errors=True)
        self._outcomes.mkdir(parents=True)
        self._began = time.time()
        started = super().start_workers(worker_group)
        self._living = {worker.global_rank: started[worker.local_rank] for worker in worker_group.workers}
        signal.signal(signal.SIGINT, self._on_interrupt)  # torch's own would end the ranks
        return started

    def monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """How the ranks do. Once one has failed, the others have a while before they are ended.

        Raises:
            JobInterrupted: they were interrupted, so that none is to be started again.
        """
        ended = {rank: status for rank, pid in self._living.items() if (status := _status(pid)) is not None}
        if any(ended.values()) and len(ended) < len(self._living):
            now = time.monotonic()
            if self._failed_at is None:
                self._failed_at = now
            orderly = set(ended.values()) <= {0, EXIT_PREEMPTED}
            if now < self._failed_at + (ORDERLY_SECONDS if orderly else GRACE_SECONDS):
                return RunResult(state=WorkerState.HEALTHY)
            for rank in self._living.keys() - ended.keys():
                _send(self._living[rank], signal.SIGKILL)
        result = super().monitor_workers(worker_group)
        if not result.is_failed():
            if result.state == WorkerState.SUCCEEDED:
                self._living = {}  # an interrupt ends the wait for other machines
            return result
        statuses = {rank: failure.exitcode for rank, failure in result.failures.items()}
        own = {rank: status for rank, status in ended.items() if status} or statuses
        if any(status < 0 for status in statuses.values()):  # rank 0 may have had no time to close its progress bar
            release_terminal()
        everybody, self._living = set(self._living), {}
        outcomes = self.outcomes
        if self.interrupts or any(status in (-signal.SIGINT, 128 + signal.SIGINT) for status in own.values()):
            # Such as a checkpoint that could not be saved.
            if any(one.problems and not one.follows for one in outcomes.values()):
                self.failure = _failure(own, everybody, outcomes, lambda: None)
            raise JobInterrupted
        self.failure = _failure(own, everybody, outcomes, lambda: self._diagnose(self._began))
        if self._attempt < self._attempts:
            self._attempt += 1
            *others, first = self.failure.lines
            for line in others:
                _print(line)
            _print(f"{first}; restarting (attempt {self._attempt} of {self._attempts})")
        return result

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        """Ranks have sessions of their own, so that a terminal's Ctrl-C reaches this process alone."""
        if not self._living:
            raise KeyboardInterrupt
        self.interrupts += 1
        if self.interrupts == 1:
            announce_interrupt()
        for pid in self._living.values():
            _send(pid, signal.SIGINT if self.interrupts <= 2 else signal.SIGKILL)


def read_outcomes(folder: Path) -> dict[int, Outcome]:
    """Those that ranks have left in ``folder``, by rank."""
    found: dict[int, Outcome] = {}
    for file in sorted(folder.glob("rank-*.json")):
        values = json.loads(file.read_text(encoding="utf-8"))
        outcome = Outcome(**{**values, "problems": tuple(values["problems"])})
        found[outcome.rank] = outcome
    return found


def _send(pid: int, number: signal.Signals) -> None:
    """To a child, if it was not waited for yet."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _status(pid: int) -> int | None:
    """The exit status of a child that has ended, negative for a signal. Whoever waits for it still finds it."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _failure(
    statuses: dict[int, int], everybody: set[int], outcomes: dict[int, Outcome], diagnose: Callable[[], str | None]
) -> Failure:
    """The first cause and the others.

    Args:
        statuses: of the ranks that ended by themselves.
        everybody: the ranks of this machine.
        outcomes: of those that have left one, however they ended.
    """
    failed = {rank: one for rank, one in outcomes.items() if one.problems}
    step = max((one.step for one in outcomes.values()), default=0)
    during = f" in step {step}" if step else ""
    killed: dict[int, list[int]] = {}
    exited: dict[int, list[int]] = {}
    for rank, status in sorted(statuses.items()):
        if rank not in failed:
            (killed if status < 0 else exited).setdefault(status, []).append(rank)
    if set(exited) == {EXIT_PREEMPTED} and not killed and not failed:
        line = f"{ranks(exited[EXIT_PREEMPTED])} stopped{during} by SIGTERM, to be started again"
        return Failure(EXIT_PREEMPTED, (line,))
    lines: list[tuple[str, int]] = []
    # From the surest cause to the least: what kills a process is its own trouble, except that NCCL's watchdog aborts a rank
    # which has lost another.
    aborted = killed.pop(-signal.SIGABRT, [])
    for status, those in killed.items():
        why = " (out of memory?)" if status == -signal.SIGKILL else ""
        lines.append((f"error: {ranks(those)} {_was(those)} killed by {_name(-status)}{during}{why}", 128 - status))
    own = [one for one in failed.values() if not one.follows]
    lines += [(line, _status_of(own, statuses)) for line in report_lines(own)]
    for status, those in exited.items():
        lines.append(
            (f"error: {ranks(those)} ended with status {status}{during}; it left no reason but what it printed", status)
        )
    if aborted:
        lines.append((f"error: {ranks(aborted)} {_was(aborted)} killed by SIGABRT{during}", 128 + signal.SIGABRT))
    found = diagnose() if not own else None
    if not lines:
        lines.append((f"error: {_lost(everybody - set(statuses), failed, during, found is None)}", 1))
    if found is not None:
        line, status = lines[0]
        lines[0] = (f"{line}; {found}", status)
    return Failure(lines[0][1], tuple(line for line, _ in reversed(lines)))


def _lost(silent: set[int], failed: dict[int, Outcome], during: str, shows_log: bool) -> str:
    """Of ranks that failed only since another did not answer.

    Args:
        shows_log: whether to name the log of one of them.
    """
    first = min(failed.values(), key=lambda one: one.time)
    waited = _MILLISECONDS.search(first.problems[0])
    so_long = f" for {int(waited[1]) / 1000:g} s" if waited else ""
    missing = ranks(silent) if silent else "a rank of another machine"
    verb = "have" if len(silent) > 1 else "has"
    gone = f"{missing} {verb} not answered{so_long}{during}"
    if not first.log or not shows_log:
        return gone
    return f"{gone}; the traceback of {ranks([first.rank])}, which lost it, is in {first.log}"


def _status_of(own: list[Outcome], statuses: dict[int, int]) -> int:
    first = min(own, key=lambda one: one.time)
    return abs(statuses.get(first.rank, 1)) or 1


def _was(those: list[int]) -> str:
    return "was" if len(those) == 1 else "were"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _print(line: str) -> None:
    print(f"titan: {line}", file=sys.stderr, flush=True)
