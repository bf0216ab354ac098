"""Runs a job on this machine: meets the other machines, starts the ranks, watches them, and restarts them or ends the job.
Passes on interrupts, and reports each failure in one line. Imports no torch."""

from __future__ import annotations

import functools
import logging
import shutil
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from titan_core.api import UserError
from titan_core.toolkit.errors import EXIT_BAD_DEVICE, EXIT_INTERRUPTED, EXIT_LOST_PEER, EXIT_USER_ERROR
from titan_core.toolkit.launching import (
    BEGAN,
    INTERRUPTED,
    LISTENER,
    RESTART,
    Began,
    Outcome,
    announce_interrupt,
    interrupted_line,
    own_command,
    resume_line,
)
from titan_core.toolkit.output import require_output
from titan_core.toolkit.processes import process_began
from titan_core.toolkit.status import phase
from titan_core.toolkit.text import ranks
from titan_launch.meeting.machines import JobEnded, Machines, Place, changes
from titan_launch.meeting.rendezvous import RendezvousError, RendezvousLost
from titan_launch.meeting.sizes import overrides
from titan_launch.ranks.attempt import Attempt, Ended
from titan_launch.ranks.logs import RankLogs
from titan_launch.ranks.progress import StepLimits
from titan_launch.restart import policy
from titan_launch.restart.failure import Evidence, Failure, failure_elsewhere, failure_of, loss_of_machines
from titan_launch.restart.policy import Decision, RestartPolicy
from titan_launch.restart.recovery import Restart
from titan_launch.terminal.console import Console
from titan_launch.terminal.signals import Signals, Terminated

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
"""How often the agent looks at the ranks."""


_FINAL = {Ended.COMPLETE, Ended.INTERRUPTED, Ended.FAILED}


@dataclass
class Agent:
    """Runs the job on this machine. Prints why an attempt failed, when the next one starts, and how the job ended."""

    command: Sequence[str]
    """Starts a rank."""
    environment: Mapping[str, str]
    """Of the ranks, beside that of this process."""
    machines: Machines
    outcomes: Path
    """The folder where the ranks write their outcomes."""
    logs: RankLogs
    """What the ranks print."""
    console: Console
    diagnose: Callable[[float], str | None]
    """Returns what observers recorded about unresponsive ranks, for an attempt that began at the given time (epoch)."""
    restart_policy: RestartPolicy
    """Whether failed ranks are restarted, and when."""
    step_limits: StepLimits | None = None
    """How long a step may take if there are several ranks."""
    grace: int = policy.SAVE_SECONDS
    """Seconds that ranks have to finish a step and save before SIGKILL."""
    trains: bool = True
    """Whether interrupted ranks complete their step, or end at once."""
    poll_seconds: float = POLL_SECONDS
    attempt: Attempt | None = field(default=None, init=False)
    """The current attempt, or the last one."""
    failure: Failure | None = field(default=None, init=False)
    """Why the last attempt failed, if it did."""
    interrupts: int = field(default=0, init=False)
    """Number of interrupts since the ranks were first started."""

    def __post_init__(self) -> None:
        self.signals = Signals(self._on_interrupt)
        self._number = 1  # of the attempt, in what is printed
        self._restarts = 0
        self._before: Place | None = None  # in the round of the last attempt
        self._last: Ended | None = None  # how that attempt ended
        self._cost: Restart | None = None  # of the restart that is due

    def run(self) -> int:
        """Run the job until its end, or until a signal ends this process; return the exit status.

        Raises:
            UserError: the job contains a mistake, or the machines do not fit together.
            RendezvousError: the machines did not meet. Once they have, the loss of the rendezvous is that of a peer.
        """
        try:
            with self.signals:
                return self._run()
        except Terminated as error:
            self.machines.leave()  # other machines may continue without this one
            self.logs.end_attempt()
            self.console.say(f"ended by {error.number.name}")
            return 128 + error.number

    def _run(self) -> int:
        closes, status, line = True, EXIT_INTERRUPTED, "the job was interrupted"  # unless it ends otherwise
        try:
            self._make_attempts()
            status, line = self._end()
            if status == EXIT_BAD_DEVICE and self.machines.elastic:
                closes = False
                self.machines.leave()  # the others continue without its device
        except JobEnded as error:
            closes, retried = False, self._last is Ended.RETRIED
            self.failure = failure_elsewhere(error.record, self.failure, retried)
        except RendezvousError as error:
            if self.attempt is None:
                raise
            closes = False
            self.failure = loss_of_machines(error, self.failure, self.machines.options.endpoint)
        except UserError as error:
            status, line = EXIT_USER_ERROR, str(error)
            raise
        except Terminated:
            closes = False  # see run
            raise
        finally:
            if closes and self.machines.job_ends_here:
                try:
                    self.machines.end_job(status, line)
                except RendezvousError as error:
                    log.warning("cannot close the rendezvous: %s", error)
        return self._report_the_end()

    def _make_attempts(self) -> None:
        """Meet the other machines and agree on a plan, start the ranks and watch them, until an attempt is the last one."""
        try:
            while self._last not in _FINAL:
                try:
                    place = self.machines.meet(self.attempt is not None)
                    if not self._may_continue(place):
                        return
                    if place.trains:
                        self._last = self._watch(self._start(place), place)
                    else:
                        self.machines.idle()
                        self._last = Ended.OVERTAKEN
                except RendezvousLost as error:
                    self._reconnect(error)
            if self._last is Ended.COMPLETE:
                self.machines.await_completion()
        except RendezvousError:
            if not self.interrupts:
                raise
            self._last = Ended.INTERRUPTED  # those of other machines were interrupted too
        finally:
            self._end_ranks(signal.SIGTERM, self.grace)

    def _may_continue(self, place: Place) -> bool:
        """Say what has changed since the last attempt. Return whether another one may be made: not if the ranks lost each
        other although all machines are there, and may not be restarted again."""
        before, last, self._before, self._last = self._before, self._last, place, None
        if not self.machines.elastic:
            if last is Ended.OVERTAKEN:
                self.console.say("machines have joined or left; restarting the ranks")
            return True
        failed_itself = last is Ended.RETRIED
        why = changes(before.members if before else (), place.members) or ("" if failed_itself else place.cause)
        if last is Ended.FOLLOWED and not why:
            if not self._decide(EXIT_LOST_PEER).restarts:
                return False
            self._number += 1
        if before is not None and not (failed_itself and place.members == before.members):
            why = why or "the ranks lost each other"
            self.console.say(f"{why}; restarting: {before.plan.ranks} -> {place.plan}")
        if place.plan.why:
            size, trains = len(place.members), place.plan.machines
            if not place.trains:
                self.failure = None
                self.console.say(f"this machine idles: {trains} of {size} machines train, because {place.plan.why}")
            elif place.machine == 0:
                self.console.say(f"{size - trains} of {size} machines idle, because {place.plan.why}")
        return True

    def _start(self, place: Place) -> Attempt:
        """Start this machine's ranks."""
        launched = process_began()
        environment, listener = {**self.environment, BEGAN: Began(launched, launched).as_text()}, self.machines.listener
        if self.attempt is not None:
            now = time.time()
            cost = self._cost or Restart(now, now, now, 0.0, now, self.attempt.completed)
            environment[RESTART], self._cost = replace(cost, started=now).as_text(), None
            environment[BEGAN] = Began(launched, cost.failed).as_text()
        self.failure = None
        shutil.rmtree(self.outcomes, ignore_errors=True)
        self.outcomes.mkdir(parents=True)
        shared = {
            "WORLD_SIZE": place.plan.ranks, "LOCAL_WORLD_SIZE": len(place.ranks), "GROUP_RANK": place.machine,
            "GROUP_WORLD_SIZE": place.plan.machines, "MASTER_ADDR": place.master[0], "MASTER_PORT": place.master[1],
            "TORCHELASTIC_RESTART_COUNT": self._restarts,
        }  # fmt: skip
        environment |= {name: str(value) for name, value in shared.items()}
        environments = {
            rank: {**environment, "RANK": str(rank), "LOCAL_RANK": str(number)} for number, rank in enumerate(place.ranks)
        }
        inherited: dict[int, Sequence[int]] = {}
        if listener is not None:
            environments[0][LISTENER], inherited[0] = str(listener.fileno()), [listener.fileno()]
        command = [*self.command]
        if self.machines.elastic:
            command += [word for one in overrides(place.plan.batch) for word in (f"--{one.key}", one.text)]
        with self.signals.deferred():
            streams = self.logs.streams(place.ranks)
            attempt = self.attempt = Attempt(command, environments, streams, self.outcomes, inherited)
            self.machines.stop_listening()  # the ranks have the socket
            if not self.logs.shows(place.ranks):
                self.console.say(f"{ranks(place.ranks)} of {place.plan.ranks}: the output is in {self.logs.folder}")
            self.logs.begin_attempt()
        return attempt

    def _watch(self, attempt: Attempt, place: Place) -> Ended:
        """Wait until the ranks have ended, or one has failed, or a step takes too long, or machines have joined or left."""
        with ExitStack() as starting:
            starting.enter_context(phase(f"starting {ranks(place.ranks)}"))
            lost_at: float | None = None  # a machine whose ranks those of this one wait for
            while True:
                time.sleep(self.poll_seconds)
                require_output()
                ended = attempt.ended
                running = len(ended) < len(attempt.ranks)
                if running and self.step_limits is not None and place.plan.ranks > 1:
                    attempt.kill_hung(self.step_limits)
                if ended or not self.console.shows_status:
                    starting.close()
                if not running or attempt.hung or any(ended.values()):
                    return self._judge(attempt)
                now = time.monotonic()
                if self.machines.lost():
                    lost_at = lost_at or now
                    if now >= lost_at + policy.GRACE_SECONDS:  # the ranks wait on, as they do with NCCL
                        return self._stop(signal.SIGKILL, 0.0)
                if self.machines.others_wait():
                    return self._stop(signal.SIGTERM, policy.GRACE_SECONDS if lost_at else self.grace)

    def _judge(self, attempt: Attempt) -> Ended:
        """End an attempt whose ranks have ended, or of which one has failed, and decide what follows."""
        noticed = time.time()
        ended = self._await_the_rest(attempt)
        attempt.send(signal.SIGKILL)
        statuses = {rank: status for rank, status in self._end_ranks(signal.SIGKILL, 0.0).items() if status}
        if not statuses:
            return Ended.COMPLETE
        now = time.time()
        exited = {rank: status for rank, status in ended.items() if status} or statuses  # without those killed above
        logs = {rank: str(self.logs.log_of(rank)) for rank in attempt.ranks}
        found = Evidence({} if attempt.hung else exited, logs, attempt.outcomes, attempt.progress, attempt.hung)
        self.logs.end_attempt()  # whatever the ranks printed comes before the reason
        if self.interrupts or found.is_interrupted:
            if found.causes:  # such as a checkpoint that cannot be saved
                self.failure = failure_of(found, lambda: None)
            return Ended.INTERRUPTED
        follows = self.machines.elastic and found.follows(self.machines.lost())
        diagnose = functools.cache(lambda: None if follows else self.diagnose(attempt.began))
        self.failure = failure_of(found, diagnose)
        began = found.first_failure(noticed, self.failure.status)
        self._cost = Restart(began, noticed, now, 0.0, now, attempt.completed)
        if follows:
            return Ended.FOLLOWED
        decision = self._decide(self.failure.status)
        if decision.restarts:  # the logs make room for those of the next attempt
            self.failure = failure_of(found.with_logs(self.logs.set_aside(attempt.ranks)), diagnose)
        self.machines.report_failure(self.failure.status, self.failure.lines[-1])
        *others, cause = self.failure.lines
        if decision.restarts:
            self._announce(others, cause, decision)
            return Ended.RETRIED
        if decision.why:
            self.failure = replace(self.failure, lines=(*others, f"{cause}; not restarted, because {decision.why}"))
        return Ended.FAILED

    def _announce(self, others: Sequence[str], cause: str, decision: Decision) -> None:
        """Print why the ranks are restarted, and wait if the policy says so."""
        self._number += 1
        self._restarts += 1
        for line in others:
            self.console.say(line)
        when = f"restarting in {decision.wait:g} s" if decision.wait else "restarting"
        self.console.say(f"{cause}; {when} (attempt {self._number} of {self._number + decision.left})")
        time.sleep(decision.wait)  # an interrupt or SIGTERM ends it
        assert self._cost is not None
        self._cost = replace(self._cost, waited=decision.wait)

    def _await_the_rest(self, attempt: Attempt) -> dict[int, int]:
        """Wait for the ranks that are left after a failure, as long as they may take; return the exit statuses. Machines
        that join meanwhile wait: a restart would come without a report of the failure."""
        ended, began = attempt.ended, time.monotonic()
        while len(ended) < len(attempt.ranks):
            recorded = {rank for rank, one in attempt.outcomes.items() if one.problems}
            patience = policy.patience(ended.values(), attempt.ranks - ended.keys() <= recorded, self.grace)
            if time.monotonic() >= began + patience:
                break
            time.sleep(self.poll_seconds)
            ended = attempt.ended
        return ended

    def _decide(self, status: int) -> Decision:
        """Decide whether to restart the ranks after a failure."""
        assert self.attempt is not None
        return self.restart_policy.after(status, self.attempt.begun, self.attempt.completed)

    def _stop(self, number: signal.Signals, seconds: float) -> Ended:
        """End ranks that run, because machines have joined or left."""
        self._end_ranks(number, seconds)
        return Ended.INTERRUPTED if self.interrupts else Ended.OVERTAKEN

    def _end_ranks(self, number: signal.Signals, seconds: float) -> dict[int, int]:
        """Send a signal to the ranks, and SIGKILL to those that are left after ``seconds``; return the exit status of each.
        Other signals to this process do not shorten that time, except that an interrupt reaches the ranks."""
        self.machines.stop_listening()
        if self.attempt is None:
            return {}
        try:
            with self.signals.deferred():
                return self.attempt.close(number, seconds)
        finally:
            self.attempt.is_over = True

    def _reconnect(self, error: RendezvousLost) -> None:
        """Wait until the rendezvous of an elastic job returns.

        Raises:
            RendezvousLost: it does not, or the job cannot continue without it.
        """
        if not self.machines.elastic or self._before is None or self.interrupts:
            raise error
        self._end_ranks(signal.SIGTERM, self.grace)
        self.logs.end_attempt()
        endpoint, seconds = self.machines.options.endpoint, self.machines.options.timeout
        self.console.say(f"the rendezvous at {endpoint} has gone; waiting {seconds} s for it to return")
        try:
            self.machines.reconnect()
        except UserError as why:
            raise RendezvousLost from why
        self._before, self._last, self.failure = replace(self._before, members=()), None, None

    def _on_interrupt(self) -> bool:
        """Forward an interrupt to the ranks; return whether there are any. Each has its own session: Ctrl-C in a terminal
        reaches only this process."""
        if self.attempt is None or self.attempt.is_over:
            return False
        self.interrupts += 1
        if self.interrupts == 1:
            at_once = "titan: interrupted: ending the ranks; Ctrl-C again kills them"
            announce_interrupt(INTERRUPTED if self.trains else at_once)
        self.attempt.send(signal.SIGINT if self.interrupts <= 2 else signal.SIGKILL)
        return True

    def _end(self) -> tuple[int, str]:
        """Return the exit status of a job that ends on this machine, and a line that says why if it is not 0."""
        if self.failure is not None:
            return self.failure.status, self.failure.lines[-1]
        if self._last is Ended.INTERRUPTED or any(outcome.interrupted for outcome in self._outcomes()):
            return EXIT_INTERRUPTED, "the job was interrupted"
        return 0, ""

    def _outcomes(self) -> Collection[Outcome]:
        """Return what the ranks recorded in the last attempt."""
        return () if self.attempt is None else self.attempt.outcomes.values()

    def _report_the_end(self) -> int:
        """Print how the job has ended; return its exit status."""
        self.logs.end_attempt()
        outcomes = self._outcomes()
        if self.failure is not None:
            for line in self.failure.lines:
                self.console.say(line)
            if line := resume_line(outcomes, own_command()):
                self.console.say(line)
            return self.failure.status
        stopped = next((outcome for outcome in outcomes if outcome.interrupted), None)
        if stopped is None and self._last is not Ended.INTERRUPTED:
            return 0
        self.console.say("interrupted" if stopped is None else interrupted_line(stopped, own_command()))
        return EXIT_INTERRUPTED
