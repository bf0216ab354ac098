"""Runs this machine's ranks under torch's elastic agent, and adds clean interrupts and one-line reports of failures."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.rendezvous.api import RendezvousError

from titan_core.api.errors import EXIT_LOST_PEER, UserError
from titan_core.api.launcher import INTERRUPTED, RESTART, Outcome, announce_interrupt
from titan_core.api.tools.phases import phase
from titan_core.api.tools.rank_names import ranks
from titan_launch import restart_policy
from titan_launch.console import Console
from titan_launch.failure import Failure, failure_of, read_outcomes
from titan_launch.progress import Progress, StepLimits, read_progress
from titan_launch.rank_logs import RankLogs
from titan_launch.recovery import Restart
from titan_launch.restart_policy import Decision, RestartLimits, RestartPolicy
from titan_launch.signals import Signals
from titan_launch.torch_private import ExtensibleAgent, machines_joined

ROLE = "rank"
"""The role of all workers, for torch's agent."""
LOOK_SECONDS = 1.0
"""How often the agent looks for steps that take too long."""


class JobInterrupted(Exception):
    """The user interrupted the ranks, and they have ended."""


class JobEnded(Exception):
    """The job has ended on the other machines."""


class RankAgent(ExtensibleAgent):
    """Forwards interrupts to the ranks and waits for them. Prints why an attempt failed and when the next one starts."""

    def __init__(
        self,
        spec: WorkerSpec,
        machines: tuple[int, int],
        endpoint: str,
        outcomes: Path,
        logs: RankLogs,
        console: Console,
        diagnose: Callable[[float], str | None],
        trains: bool = True,
        limits: RestartLimits | None = None,
        step_limits: StepLimits | None = None,
        grace: int = restart_policy.SAVE_SECONDS,
    ) -> None:
        """
        Args:
            machines: minimum and maximum number of machines.
            endpoint: where the machines meet; empty if there is only one.
            outcomes: the folder where the ranks write their outcomes.
            logs: what the ranks print.
            diagnose: returns what observers recorded about unresponsive ranks, for an attempt that began at the given time
                (seconds since the epoch).
            trains: whether interrupted ranks complete their step, or end at once.
            limits: how often and when failed ranks are restarted. Default: ``spec.max_restarts`` times.
            step_limits: how long a step may take if there are several ranks.
            grace: seconds that ranks have to finish a step and save before SIGKILL.
        """
        super().__init__(spec, logs, shutdown_timeout=grace)
        self._grace = grace
        self._machines, self._endpoint, self._diagnose = machines, endpoint, diagnose
        self._outcomes, self._logs, self._console = outcomes, logs, console
        self._interrupted = INTERRUPTED if trains else "titan: interrupted: ending the ranks; Ctrl-C again kills them"
        self._starting: phase | None = None
        self._attempt = 1
        self._policy = RestartPolicy(limits or RestartLimits(spec.max_restarts))
        self._step_limits = step_limits
        self._began = 0.0
        self._failed_at: float | None = None  # time.monotonic
        self._noticed = self._ended = self._waited = 0.0  # of the last failure: see Restart
        self._completed = 0
        self._first_failure = 0.0
        self._looked = 0.0  # time.monotonic of the last look at the ranks' progress
        self._hung: dict[int, float] = {}  # ranks whose step took too long, and its seconds
        self._progress: dict[int, Progress] = {}  # of the last attempt that has ended
        self._pids: dict[int, int] = {}  # by rank; empty once the ranks have ended
        self.signals = Signals(self._on_interrupt)
        """Handles the signals to this process while the agent runs."""
        self.interrupts = 0
        """Number of interrupts since the ranks were first started."""
        self.failure: Failure | None = None
        """The failure of the last attempt, if any."""
        self.trains = True
        """Whether the job ends with this machine."""

    @property
    def started(self) -> bool:
        """Whether this machine has met the others and started its ranks."""
        return self._began > 0

    @property
    def outcomes(self) -> dict[int, Outcome]:
        """The outcomes that ranks recorded in the last attempt, by rank."""
        return read_outcomes(self._outcomes)

    def run(self, role: str = ROLE) -> RunResult:
        """Run the job until its ranks have ended.

        Raises:
            JobInterrupted: the user interrupted the ranks, and they did not complete.
            Terminated: a signal ended this process. The ranks had time to save.
        """
        os.environ.pop(RESTART, None)
        try:
            with self.signals:
                try:
                    return super().run(role)
                finally:
                    self._pids = {}
        except (RendezvousError, DistError) as error:
            if self.interrupts:
                raise JobInterrupted from error
            raise
        finally:
            os.environ.pop(RESTART, None)
            self._end_start()

    def rendezvous(self, worker_group: WorkerGroup) -> None:
        """Wait for the other machines; show where, and how many have come."""
        if not self._endpoint:
            super().rendezvous(worker_group)
            return
        if not self._console.shows_status:
            self._console.show_status()
        least, most = self._machines
        size = str(most) if least == most else f"{least} to {most}"

        def joined() -> str:
            number = machines_joined(worker_group.spec.rdzv_handler)
            return f"needs {size}" if number is None else f"{number} of {size} joined"

        with phase(f"waiting for machines at {self._endpoint}", joined, repeat_seconds=10.0):
            super().rendezvous(worker_group)

    def start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start this machine's ranks.

        Raises:
            UserError: fewer or more machines than requested have joined.
        """
        least, most = self._machines
        size = worker_group.group_world_size or 0
        if not least <= size <= most:
            requested = str(least) if least == most else f"{least}:{most}"
            why = f"{size} machine(s) joined the rendezvous"
            raise UserError.one(f"--nnodes {requested}", why, "start titan with the same --nnodes on every machine")
        if self._began:
            if self.failure is None:
                self.report_change()
            self._pass_on_the_restart()
        self.failure = self._failed_at = None
        self._hung = {}
        shutil.rmtree(self._outcomes, ignore_errors=True)
        self._outcomes.mkdir(parents=True)
        self._began = time.time()
        mine = [worker.global_rank for worker in worker_group.workers]
        if self._starting is None:
            self._starting = phase(f"starting {ranks(mine)}").__enter__()
        with self.signals.deferred():
            started = super().start_workers(worker_group)
            self._pids = {worker.global_rank: started[worker.local_rank] for worker in worker_group.workers}
        if not self._logs.shows(mine):
            self._console.say(f"{ranks(mine)} of {worker_group.workers[0].world_size}: the output is in {self._logs.folder}")
        self._logs.begin_attempt()
        return started

    def stop_workers(self, worker_group: WorkerGroup) -> None:
        """End this machine's ranks, with time to save a checkpoint.

        Raises:
            JobInterrupted: the user interrupted the ranks before they ended, so they must not be started again.
        """
        self.stop_ranks(signal.SIGTERM, self._grace)

    def stop_ranks(self, number: signal.Signals, seconds: int) -> None:
        """:meth:`stop_workers` with another signal, or another time until SIGKILL."""
        self.end_workers(number, seconds)
        self._pids = {}
        if self.interrupts:
            raise JobInterrupted

    def end_workers(self, number: signal.Signals, seconds: int) -> None:
        """Send a signal to the ranks, and SIGKILL to those that are left after ``seconds``. Other signals to this process do
        not shorten that time, except that an interrupt reaches the ranks."""
        with self.signals.deferred():
            super().end_workers(number, seconds)

    def monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Return the state of the ranks. Once one has failed, the others have a grace period before they are killed.

        Raises:
            JobInterrupted: the user interrupted the ranks, so they must not be restarted.
        """
        ended = self._exit_statuses()
        if len(ended) < len(self._pids) and self._step_limits is not None and worker_group.workers[0].world_size > 1:
            self._end_hung_ranks(self._step_limits)
        if ended or not self._console.shows_status:
            self._end_start()
        if (self._hung or any(ended.values())) and len(ended) < len(self._pids):
            now = time.monotonic()
            if self._failed_at is None:
                self._failed_at, self._noticed = now, time.time()
            ended = self._await_the_others(self._failed_at)
            for rank in self._pids.keys() - ended.keys():
                _send(self._pids[rank], signal.SIGKILL)
        elif len(ended) < len(self._pids):
            return RunResult(state=WorkerState.HEALTHY)  # torch would reap the ranks that have ended, and forget them
        result = super().monitor_workers(worker_group)
        if not result.is_failed():
            if result.state == WorkerState.SUCCEEDED:
                self._pids = {}  # an interrupt now ends the wait for other machines
            return result
        self._ended = time.time()
        if self._failed_at is None:
            self._noticed = self._ended
        statuses = {rank: failure.exitcode for rank, failure in result.failures.items()}
        exited = {rank: status for rank, status in ended.items() if status} or statuses  # without those killed above
        local_ranks, self._pids = set(self._pids), {}
        outcomes = self.outcomes
        logs = {rank: str(self._logs.log_of(rank)) for rank in local_ranks}
        self._logs.end_attempt()  # whatever the ranks printed comes before the reason
        if self.interrupts or any(status in (-signal.SIGINT, 128 + signal.SIGINT) for status in exited.values()):
            # A rank may still have failed on its own, for example to save its checkpoint.
            if any(outcome.problems and not outcome.follows for outcome in outcomes.values()):
                self.failure = failure_of(exited, local_ranks, outcomes, logs, lambda: None)
            raise JobInterrupted
        self._progress = read_progress(self._outcomes)
        if not self._hung and self.only_follows(exited, local_ranks, outcomes):
            self.failure = failure_of(exited, local_ranks, outcomes, logs, lambda: None, self._progress)
            self._note_the_end(self.failure.status)
            self.restart_workers(worker_group)
            return RunResult(state=WorkerState.HEALTHY)
        if self._hung:
            exited = {}

        def failure() -> Failure:
            return failure_of(
                exited, local_ranks, outcomes, logs, lambda: self._diagnose(self._began), self._progress, self._hung
            )

        self.failure = failure()
        self._note_the_end(self.failure.status)
        decision = self.decide(self.failure.status)
        self.allow_restart(decision.restarts)
        if decision.restarts:  # the logs make room for those of the next attempt
            moved = self._logs.set_aside(local_ranks)
            logs = {rank: moved.get(log, log) for rank, log in logs.items()}
            outcomes = {rank: replace(one, log=moved.get(one.log, one.log)) for rank, one in outcomes.items()}
            self.failure = failure()
        self.publish_failure(self.failure)
        if decision.restarts:
            self._announce(self.failure, decision)
        elif decision.why:
            *others, first = self.failure.lines
            self.failure = replace(self.failure, lines=(*others, f"{first}; not restarted, because {decision.why}"))
        return result

    def _exit_statuses(self) -> dict[int, int]:
        """Return the exit status of each of this machine's ranks that has ended."""
        return {rank: status for rank, pid in self._pids.items() if (status := _status(pid)) is not None}

    def _await_the_others(self, failed_at: float) -> dict[int, int]:
        """Wait for the ranks that are left after a failure, as long as they may take; return the exit statuses.

        It does not return to torch meanwhile, which would restart the ranks if another machine joined, without a report of
        the failure.
        """
        while True:
            ended = self._exit_statuses()
            recorded = {rank for rank, one in self.outcomes.items() if one.problems}
            patience = restart_policy.patience(ended.values(), self._pids.keys() - ended.keys() <= recorded, self._grace)
            if len(ended) == len(self._pids) or time.monotonic() >= failed_at + patience:
                return ended
            time.sleep(self._worker_group.spec.monitor_interval)

    def _end_start(self) -> None:
        """End the phase in which the ranks start."""
        if self._starting is not None:
            self._starting.__exit__()
            self._starting = None

    def only_follows(self, exited: Mapping[int, int], local_ranks: set[int], outcomes: Mapping[int, Outcome]) -> bool:
        """Whether the ranks of this machine ended only because of another machine, so that their restart does not count.

        Args:
            exited: exit statuses of the ranks that this agent did not kill.
        """
        return False

    def report_change(self) -> None:
        """Say why the ranks are restarted although none has failed."""
        self._console.say("machines have joined or left; restarting the ranks")

    def leave(self) -> None:
        """Leave the other machines, which may continue."""

    def publish_failure(self, failure: Failure) -> None:
        """Report a failure of this machine's ranks to the other machines."""

    def publish_end(self, status: int, line: str) -> None:
        """Report the exit status of the job to the other machines, with a line that says why if it is not 0."""

    def _end_hung_ranks(self, limits: StepLimits) -> None:
        """Kill the ranks of this machine if one has been in the same step for too long. Collectives have a time limit of
        their own, so that this concerns ranks of which none waits in one."""
        now = time.monotonic()
        if self._hung or now < self._looked + LOOK_SECONDS:
            return
        self._looked = now
        late = limits.exceeded(read_progress(self._outcomes), now)
        if late:
            self._hung, self._noticed, self._failed_at = late, time.time(), time.monotonic()
            for pid in self._pids.values():
                _send(pid, signal.SIGKILL)

    def _note_the_end(self, status: int) -> None:
        """Note how far the ranks have come, and when they failed."""
        self._completed = max((one.completed for one in self._progress.values()), default=0)
        times = [outcome.time for outcome in self.outcomes.values() if outcome.problems]
        if status == EXIT_LOST_PEER:  # whatever rank is at fault, its last progress is the oldest
            times += [one.time + time.time() - time.monotonic() for one in self._progress.values()]
        self._first_failure = min([self._noticed, *times])

    def decide(self, status: int) -> Decision:
        """Decide whether to restart the ranks after a failure."""
        return self._policy.after(status, min((one.begun for one in self._progress.values()), default=0), self._completed)

    def _announce(self, failure: Failure, decision: Decision) -> None:
        """Print why the ranks are restarted, and wait if the policy says so."""
        self._attempt += 1
        *others, first = failure.lines
        for line in others:
            self._console.say(line)
        when = f"restarting in {decision.wait:g} s" if decision.wait else "restarting"
        self._console.say(f"{first}; {when} (attempt {self._attempt} of {self._attempt + decision.left})")
        began = time.time()
        time.sleep(decision.wait)  # an interrupt or SIGTERM ends it
        self._waited = time.time() - began

    def _pass_on_the_restart(self) -> None:
        """Set what restarted ranks need to report its cost."""
        now = time.time()
        if self._ended < self._began:  # none of this machine's ranks has failed
            self._completed = max((one.completed for one in read_progress(self._outcomes).values()), default=0)
            self._first_failure = self._noticed = self._ended = now
            self._waited = 0.0
        restart = Restart(self._first_failure, self._noticed, self._ended, self._waited, now, self._completed)
        os.environ[RESTART] = restart.as_text()

    def _on_interrupt(self) -> bool:
        """Forward an interrupt to the ranks; return whether there are any. Each has its own session: Ctrl-C in a terminal
        reaches only this process."""
        if not self._pids:
            return False
        self.interrupts += 1
        if self.interrupts == 1:
            announce_interrupt(self._interrupted)
        for pid in self._pids.values():
            _send(pid, signal.SIGINT if self.interrupts <= 2 else signal.SIGKILL)
        return True


def _send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a child process, unless it has been reaped: another process may then have its number."""
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        os.kill(pid, number)


def _status(pid: int) -> int | None:
    """Return the exit status of a child that has ended, negative for a signal. Does not reap it.

    ``None`` if the child is running or has been reaped.
    """
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
