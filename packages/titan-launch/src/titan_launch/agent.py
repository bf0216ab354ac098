"""Runs this machine's ranks: meets the other machines, starts the ranks, watches and restarts them, passes on interrupts,
and reports failures in one line. Imports no torch."""

from __future__ import annotations

import contextlib
import enum
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_core.api import UserError
from titan_core.toolkit.errors import EXIT_LOST_PEER
from titan_core.toolkit.launching import INTERRUPTED, LISTENER, RESTART, Outcome, announce_interrupt
from titan_core.toolkit.listening import EVERY_ADDRESS, bound_socket
from titan_core.toolkit.status import phase
from titan_core.toolkit.text import ranks
from titan_launch import restart_policy
from titan_launch.console import Console
from titan_launch.failure import Failure, failure_of, read_outcomes
from titan_launch.progress import Progress, StepLimits, read_progress
from titan_launch.rank_logs import RankLogs
from titan_launch.rank_processes import RankProcesses
from titan_launch.recovery import Restart
from titan_launch.rendezvous import LOOPBACK, Rendezvous, RendezvousClosed, RendezvousError
from titan_launch.restart_policy import Decision, RestartLimits, RestartPolicy
from titan_launch.signals import Signals
from titan_launch.sizes import Plan

if TYPE_CHECKING:
    from titan_launch.handler import Handler

LOOK_SECONDS = 1.0
"""How often the agent looks for steps that take too long."""
POLL_SECONDS = 0.1
"""How often it looks at the ranks, and at records of other machines that it waits for."""
FINISH_SECONDS = 300.0
"""How long a machine whose ranks are complete waits for those of the others."""


class JobInterrupted(Exception):
    """The user interrupted the ranks, and they have ended."""


class JobEnded(Exception):
    """The job has ended on the other machines."""


class RanksState(enum.Enum):
    """How an attempt stands on this machine."""

    RUNNING = enum.auto()
    COMPLETE = enum.auto()
    FAILED = enum.auto()


class RankAgent:
    """Starts the ranks of this machine and waits for them. Prints why an attempt failed and when the next one starts."""

    def __init__(
        self,
        command: Sequence[str],
        per_node: int,
        environment: Mapping[str, str],
        options: Rendezvous,
        handler: Handler | None,
        outcomes: Path,
        logs: RankLogs,
        console: Console,
        diagnose: Callable[[float], str | None],
        trains: bool = True,
        limits: RestartLimits | None = None,
        step_limits: StepLimits | None = None,
        grace: int = restart_policy.SAVE_SECONDS,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """
        Args:
            command: starts a rank.
            per_node: number of ranks of this machine.
            environment: of the ranks, beside that of this process.
            handler: meets the other machines; ``None`` if there are none.
            outcomes: the folder where the ranks write their outcomes.
            logs: what the ranks print.
            diagnose: returns what observers recorded about unresponsive ranks, for an attempt that began at the given time
                (seconds since the epoch).
            trains: whether interrupted ranks complete their step, or end at once.
            limits: how often and when failed ranks are restarted. Default: never.
            step_limits: how long a step may take if there are several ranks.
            grace: seconds that ranks have to finish a step and save before SIGKILL.
        """
        self._command, self._per_node, self._environment = tuple(command), per_node, dict(environment)
        self._options, self._machines, self._handler = options, options.machines, handler
        self._grace, self._diagnose, self._poll_seconds = grace, diagnose, poll_seconds
        self._outcomes, self.logs, self.console = outcomes, logs, console
        self._interrupted = INTERRUPTED if trains else "titan: interrupted: ending the ranks; Ctrl-C again kills them"
        self._starting: phase | None = None
        self._attempt = 1
        self._restarts = 0
        self._policy = RestartPolicy(limits or RestartLimits())
        self._may_restart = False
        self._step_limits = step_limits
        self._plan: Plan | None = None
        self._machine = 0  # this machine's number in the plan
        self._ranks = range(per_node)
        self._master = (LOOPBACK, 0)
        self._listener: socket.socket | None = None  # where rank 0 will serve the store of the ranks, if it runs here
        self._processes: RankProcesses | None = None
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

    def run(self) -> None:
        """Run the job until its ranks have ended; :attr:`failure` says why, unless they are complete.

        Raises:
            JobInterrupted: the user interrupted the ranks, and they did not complete.
            JobEnded: the job has ended on the other machines.
            RendezvousError: the other machines cannot be met.
            Terminated: a signal ended this process. The ranks had time to save.
        """
        try:
            with self.signals:
                try:
                    self._run()
                finally:
                    try:
                        self.end_workers(signal.SIGTERM, self._grace)
                    finally:
                        self._pids = {}
        except RendezvousError as error:
            if self.interrupts:
                raise JobInterrupted from error
            raise
        finally:
            self._end_start()

    def _run(self) -> None:
        self.rendezvous()
        self.start_workers()
        while True:
            time.sleep(self._poll_seconds)
            state = self.monitor_workers()
            if state is RanksState.COMPLETE:
                self._await_other_machines()
                return
            if state is RanksState.FAILED:
                if not self._may_restart:
                    self.stop_workers()
                    return
                self._restarts += 1
                self.restart_workers()
            elif self._handler is not None and self._handler.num_nodes_waiting():
                self.restart_workers()

    def restart_workers(self) -> None:
        """Stop the ranks, meet the other machines and start the ranks again. Does not count as a restart."""
        self.stop_workers()
        self.rendezvous()
        self.start_workers()

    def rendezvous(self) -> None:
        """Wait for the other machines, and agree with them on who trains, and on the ranks of each.

        Raises:
            JobEnded: this machine was not needed, and the job has ended.
        """
        if self._handler is None:
            bind = self._options.bind or LOOPBACK
            self._listen(LOOPBACK if bind in EVERY_ADDRESS else bind, bind)
            self._adopt(Plan(1, self._per_node), 0, 0)
            return
        if not self.console.shows_status:
            self.console.show_status()
        least, most = self._machines
        size, handler = str(most) if least == most else f"{least} to {most}", self._handler

        def joined() -> str:
            return f"{len(handler.state.members)} of {size} joined"

        try:
            with phase(f"waiting for machines at {self._options.endpoint}", joined, repeat_seconds=10.0):
                while not self._meet(handler):
                    pass
        except RendezvousClosed:
            if self.started or not handler.round.prefix:
                raise
            self.trains = False
            raise JobEnded from None

    def _meet(self, handler: Handler) -> bool:
        """Meet the other machines; return whether all stayed until they agreed.

        Raises:
            UserError: fewer or more machines than requested have joined.
        """
        here = handler.next_rendezvous()
        least, most = self._machines
        size = len(here.members)
        if not least <= size <= most:
            requested = str(least) if least == most else f"{least}:{most}"
            why = f"{size} machine(s) joined the rendezvous"
            raise UserError.one(f"--nnodes {requested}", why, "start titan with the same --nnodes on every machine")
        handler.put(f"machine/{here.rank}", {"ranks": self._per_node, **self.offer()})
        if here.rank == 0:
            machines = self._await(handler, [f"machine/{number}" for number in range(size)])
            if machines is None:
                return False
            bind = self._options.bind if self._options.bind is not None else self._options.local_addr or ""
            master = self._listen(handler.node.addr, bind)
            counts = [machine["ranks"] for machine in machines]
            handler.put("plan", {"plan": asdict(self.choose(machines)), "ranks": counts, "master": master})
        agreed = self._await(handler, ["plan"])
        if agreed is None:
            return False
        (found,) = agreed
        self._master = (found["master"][0], found["master"][1])
        return self._adopt(Plan(**found["plan"]), here.rank, sum(found["ranks"][: here.rank]))

    def _await(self, handler: Handler, names: Sequence[str]) -> list[Any] | None:
        """Wait for records of the round, and return them; ``None`` if a machine has left or joined meanwhile."""
        found: dict[str, Any] = {}
        while True:
            for name in names:
                if name not in found and (value := handler.get(name)) is not None:
                    found[name] = value
            if len(found) == len(names):
                return [found[name] for name in names]
            if handler.changed():
                return None
            time.sleep(self._poll_seconds)

    def _listen(self, address: str, bind: str) -> tuple[str, int]:
        """Choose the port where rank 0 serves the store of the ranks; return its address.

        Args:
            address: where the ranks find it.
            bind: the address to listen on; ``""`` for all.
        """
        self._stop_listening()
        self._listener = bound_socket(bind)
        self._master = address, self._listener.getsockname()[1]
        return self._master

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def offer(self) -> dict[str, Any]:
        """Return what the first machine must know of this one to choose a plan, beside the number of its ranks."""
        return {}

    def choose(self, machines: Sequence[Mapping[str, Any]]) -> Plan:
        """Return who trains, of the machines of a round."""
        return Plan(len(machines), sum(machine["ranks"] for machine in machines))

    def _adopt(self, plan: Plan, machine: int, first: int) -> bool:
        """Take this machine's place in a plan; return whether the job can train by it.

        Args:
            first: the global rank of its first rank.
        """
        self._plan, self._machine, self._ranks = plan, machine, range(first, first + self._per_node)
        return True

    def start_workers(self) -> None:
        """Start this machine's ranks."""
        environment = dict(self._environment)
        if self._began:
            if self.failure is None:
                self.report_change()
            environment[RESTART] = self._restart()
        self.failure = self._failed_at = None
        self._hung = {}
        shutil.rmtree(self._outcomes, ignore_errors=True)
        self._outcomes.mkdir(parents=True)
        self._began = time.time()
        if self._starting is None:
            self._starting = phase(f"starting {ranks(self._ranks)}").__enter__()
        assert self._plan is not None
        with self.signals.deferred():
            streams = self.logs.streams(self._ranks)
            inherited = {} if self._listener is None else {0: [self._listener.fileno()]}
            environments = {rank: {**environment, **self._environment_of(rank)} for rank in self._ranks}
            self._processes = RankProcesses(self._command, environments, streams, inherited)
            self._pids = self._processes.pids
            self._stop_listening()  # the ranks have it
            if not self.logs.shows(self._ranks):
                self.console.say(f"{ranks(self._ranks)} of {self._plan.ranks}: the output is in {self.logs.folder}")
            self.logs.begin_attempt()

    def _environment_of(self, rank: int) -> dict[str, str]:
        """Return the variables of a rank that torchrun would set too, and the socket for the store of the ranks."""
        assert self._plan is not None
        found = {
            "RANK": rank, "LOCAL_RANK": rank - self._ranks.start, "WORLD_SIZE": self._plan.ranks,
            "LOCAL_WORLD_SIZE": self._per_node, "GROUP_RANK": self._machine, "GROUP_WORLD_SIZE": self._plan.machines,
            "MASTER_ADDR": self._master[0], "MASTER_PORT": self._master[1], "TORCHELASTIC_RESTART_COUNT": self._restarts,
        }  # fmt: skip
        if self._listener is not None and rank == 0:
            found[LISTENER] = self._listener.fileno()
        return {name: str(value) for name, value in found.items()}

    def stop_workers(self) -> None:
        """End this machine's ranks, with time to save a checkpoint.

        Raises:
            JobInterrupted: the user interrupted the ranks before they ended, so they must not be started again.
        """
        self.stop_ranks(signal.SIGTERM, self._grace)

    def stop_ranks(self, number: signal.Signals, seconds: float) -> None:
        """:meth:`stop_workers` with another signal, or another time until SIGKILL."""
        self.end_workers(number, seconds)
        self._pids = {}
        if self.interrupts:
            raise JobInterrupted

    def end_workers(self, number: signal.Signals, seconds: float) -> dict[int, int]:
        """Send a signal to the ranks, and SIGKILL to those that are left after ``seconds``; return the exit status of each.
        Other signals to this process do not shorten that time, except that an interrupt reaches the ranks."""
        self._stop_listening()
        with self.signals.deferred():
            return {} if self._processes is None else self._processes.close(number, seconds)

    def _await_other_machines(self) -> None:
        """Wait until the ranks of the other machines are complete too: they may need the store that this one hosts."""
        if self._handler is None or self._plan is None:
            return
        end = time.monotonic() + FINISH_SECONDS
        with contextlib.suppress(RendezvousError):  # the ranks of this machine are complete
            self._handler.put(f"done/{self._machine}", True)
            others = [f"done/{number}" for number in range(self._plan.machines)]
            while others and time.monotonic() < end and not self._handler.changed():
                if self._handler.get(others[0]) is None:
                    time.sleep(self._poll_seconds)
                else:
                    others.pop(0)

    def monitor_workers(self) -> RanksState:
        """Return the state of the ranks. Once one has failed, the others have a grace period before they are killed.

        Raises:
            JobInterrupted: the user interrupted the ranks, so they must not be restarted.
        """
        ended = self._exit_statuses()
        alone = self._plan is None or self._plan.ranks == 1
        if len(ended) < len(self._pids) and self._step_limits is not None and not alone:
            self._end_hung_ranks(self._step_limits)
        if ended or not self.console.shows_status:
            self._end_start()
        if (self._hung or any(ended.values())) and len(ended) < len(self._pids):
            now = time.monotonic()
            if self._failed_at is None:
                self._failed_at, self._noticed = now, time.time()
            ended = self._await_the_others(self._failed_at)
            for rank in self._pids.keys() - ended.keys():
                _send(self._pids[rank], signal.SIGKILL)
        elif len(ended) < len(self._pids):
            return RanksState.RUNNING
        statuses = {rank: status for rank, status in self.end_workers(signal.SIGKILL, 0.0).items() if status}
        if not statuses:
            self._pids = {}  # an interrupt now ends the wait for other machines
            return RanksState.COMPLETE
        self._ended = time.time()
        if self._failed_at is None:
            self._noticed = self._ended
        exited = {rank: status for rank, status in ended.items() if status} or statuses  # without those killed above
        local_ranks, self._pids = set(self._pids), {}
        outcomes = self.outcomes
        logs = {rank: str(self.logs.log_of(rank)) for rank in local_ranks}
        self.logs.end_attempt()  # whatever the ranks printed comes before the reason
        if self.interrupts or any(status in (-signal.SIGINT, 128 + signal.SIGINT) for status in exited.values()):
            # A rank may still have failed on its own, for example to save its checkpoint.
            if any(outcome.problems and not outcome.follows for outcome in outcomes.values()):
                self.failure = failure_of(exited, local_ranks, outcomes, logs, lambda: None)
            raise JobInterrupted
        self._progress = read_progress(self._outcomes)
        if not self._hung and self.only_follows(exited, local_ranks, outcomes):
            self.failure = failure_of(exited, local_ranks, outcomes, logs, lambda: None, self._progress)
            self._note_the_end(self.failure.status)
            self.restart_workers()
            return RanksState.RUNNING
        if self._hung:
            exited = {}

        def failure() -> Failure:
            return failure_of(
                exited, local_ranks, outcomes, logs, lambda: self._diagnose(self._began), self._progress, self._hung
            )

        self.failure = failure()
        self._note_the_end(self.failure.status)
        decision = self.decide(self.failure.status)
        self._may_restart = decision.restarts
        if decision.restarts:  # the logs make room for those of the next attempt
            moved = self.logs.set_aside(local_ranks)
            logs = {rank: moved.get(log, log) for rank, log in logs.items()}
            outcomes = {rank: replace(one, log=moved.get(one.log, one.log)) for rank, one in outcomes.items()}
            self.failure = failure()
        self.publish_failure(self.failure)
        if decision.restarts:
            self._announce(self.failure, decision)
        elif decision.why:
            *others, first = self.failure.lines
            self.failure = replace(self.failure, lines=(*others, f"{first}; not restarted, because {decision.why}"))
        return RanksState.FAILED

    def _exit_statuses(self) -> dict[int, int]:
        """Return the exit status of each of this machine's ranks that has ended."""
        return {rank: status for rank, pid in self._pids.items() if (status := _status(pid)) is not None}

    def _await_the_others(self, failed_at: float) -> dict[int, int]:
        """Wait for the ranks that are left after a failure, as long as they may take; return the exit statuses. Machines
        that join meanwhile wait: a restart would come without a report of the failure."""
        while True:
            ended = self._exit_statuses()
            recorded = {rank for rank, one in self.outcomes.items() if one.problems}
            patience = restart_policy.patience(ended.values(), self._pids.keys() - ended.keys() <= recorded, self._grace)
            if len(ended) == len(self._pids) or time.monotonic() >= failed_at + patience:
                return ended
            time.sleep(self._poll_seconds)

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
        self.console.say("machines have joined or left; restarting the ranks")

    def leave(self) -> None:
        """Leave the other machines, which may continue."""

    def close(self, status: int, line: str) -> None:
        """End the job on all machines.

        Args:
            status: exit status of the job.
            line: why, if it is not 0.
        """
        if self._handler is not None:
            self.publish_end(status, line)
            self._handler.shutdown()

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
            self.console.say(line)
        when = f"restarting in {decision.wait:g} s" if decision.wait else "restarting"
        self.console.say(f"{first}; {when} (attempt {self._attempt} of {self._attempt + decision.left})")
        began = time.time()
        time.sleep(decision.wait)  # an interrupt or SIGTERM ends it
        self._waited = time.time() - began

    def _restart(self) -> str:
        """Return what restarted ranks need to report its cost."""
        now = time.time()
        if self._ended < self._began:  # none of this machine's ranks has failed
            self._completed = max((one.completed for one in read_progress(self._outcomes).values()), default=0)
            self._first_failure = self._noticed = self._ended = now
            self._waited = 0.0
        restart = Restart(self._first_failure, self._noticed, self._ended, self._waited, now, self._completed)
        return restart.as_text()

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
