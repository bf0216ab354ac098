"""Elastic jobs (``--nnodes MIN:MAX``): an agent whose machines may leave and return.

The machines of each round agree on a :class:`~titan_launch.sizes.Plan` through the store of their rendezvous. Machines that
leave or join, and failures that another machine caused, do not count against ``--max-restarts``.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from titan_core.api import UserError
from titan_core.toolkit.errors import EXIT_LOST_PEER, EXIT_PREEMPTED
from titan_core.toolkit.launching import Outcome
from titan_core.toolkit.status import phase
from titan_launch import restart_policy
from titan_launch.agent import JobEnded, RankAgent, RanksState
from titan_launch.failure import Failure
from titan_launch.rendezvous import RendezvousClosed, RendezvousError, RendezvousLost
from titan_launch.sizes import Plan, Sizes, choose, overrides

if TYPE_CHECKING:
    from titan_launch.handler import Handler, Node, Round

LAST_CALL_SECONDS = 5.0
"""How long machines that meet again wait for further ones, once the least number has joined. At the first start, when
machines may come later, they wait for 30 s."""


class StoreLost(Exception):
    """The store of the rendezvous no longer answers."""


class ElasticAgent(RankAgent):
    """Restarts the job on the machines that are left, and on more of them when they return."""

    _handler: Handler

    def __init__(self, *arguments: Any, sizes: Sizes, when_impossible: Literal["wait", "stop"], **more: Any) -> None:
        """
        Args:
            arguments, more: those of :class:`~titan_launch.agent.RankAgent`.
            sizes: the numbers of ranks that the job can train on.
            when_impossible: what to do while the job cannot train on the machines that have joined.
        """
        super().__init__(*arguments, **more)
        self._sizes, self._when_impossible = sizes, when_impossible
        self._own_command = self._command
        self._before: Plan | None = None
        self._machines_before: frozenset[Node] = frozenset()
        self._trainers: frozenset[Node] = frozenset()
        self._lost_at: float | None = None
        self._caused_elsewhere = ""
        self._follows = self._failed_itself = False
        self.trains = False  # the job continues without a machine that waits or idles

    def run(self) -> None:
        """Run the job until its end. May be called again after :class:`StoreLost`.

        Raises:
            StoreLost: the store of the rendezvous no longer answers. The ranks have ended.
        """
        try:
            super().run()
        except RendezvousLost as error:
            if self._plan is None:
                raise
            self._handler.stop()
            raise StoreLost from error

    def reconnect(self, handler: Handler) -> None:
        """Use another rendezvous, for the next :meth:`run`."""
        self._handler = handler
        self._machines_before, self.failure = frozenset(), None
        self._follows, self._failed_itself, self._caused_elsewhere = False, False, "the rendezvous has returned"

    def rendezvous(self) -> None:
        """Meet the other machines until those that have joined can train, and agree on a plan.

        Raises:
            UserError: no number of them can train, and the user has chosen to stop, or no other machine came in time.
            JobEnded: the job has ended on the other machines.
        """
        self.trains, before = False, self._handler.round
        try:
            super().rendezvous()
        except (JobEnded, RendezvousClosed):
            if not self._handler.round.prefix:
                raise
            self._read_end()
            raise JobEnded from None
        self._read_failure(before)

    def _meet(self, handler: Handler) -> bool:
        if not self._options.fixed_last_call and handler.has_begun:
            handler.last_call = LAST_CALL_SECONDS
        return super()._meet(handler)

    def offer(self) -> dict[str, Any]:
        """Return the global batch to keep; 0 if this machine has not trained."""
        return {"batch": self._plan.batch if self._plan is not None else 0}

    def choose(self, machines: Sequence[Mapping[str, Any]]) -> Plan:
        """See :meth:`titan_launch.agent.RankAgent.choose`: as many machines as can train."""
        kept = max(machine["batch"] for machine in machines)
        return choose(self._sizes, [machine["ranks"] for machine in machines], self._machines[0], kept)

    def _adopt(self, plan: Plan, machine: int, first: int) -> bool:
        """See :meth:`titan_launch.agent.RankAgent._adopt`. Waits for other machines if the job cannot train.

        Raises:
            UserError: see :meth:`rendezvous`.
            RendezvousClosed: the job has ended.
        """
        if not plan.machines:
            self._wait(plan)
            return False
        self.trains = machine < plan.machines
        self._trainers = frozenset(self._handler.round.members[: plan.machines])
        return super()._adopt(plan, machine, first)

    def start_workers(self) -> None:
        """Start this machine's ranks, unless it idles; report what has changed.

        Raises:
            JobEnded: the ranks lost each other although all machines are there, and may not be restarted again.
        """
        assert self._plan is not None
        now = frozenset(self._handler.round.members)
        why = _changes(self._machines_before, now) or self._caused_elsewhere
        if self._follows and not why:
            if not self.decide(EXIT_LOST_PEER).restarts:
                raise JobEnded
            self._attempt += 1
        if self._before is not None and (not self._failed_itself or now != self._machines_before):
            why = why or "the ranks lost each other"
            self.console.say(f"{why}; restarting: {self._before.ranks} -> {self._plan}")
        self._machines_before, self._before = now, self._plan
        self._follows, self._failed_itself, self._caused_elsewhere, self._lost_at = False, False, "", None
        if not self.trains:
            self.failure = None
            trains = self._plan.machines
            self.console.say(f"this machine idles: {trains} of {len(now)} machines train, because {self._plan.why}")
            return
        if self._plan.why and self._machine == 0:
            self.console.say(f"{len(now) - self._plan.machines} of {len(now)} machines idle, because {self._plan.why}")
        more = [argument for one in overrides(self._plan.batch) for argument in (f"--{one.key}", one.text)]
        self._command = (*self._own_command, *more)
        super().start_workers()

    def stop_workers(self) -> None:
        """End the ranks: with time to save a checkpoint, unless they wait for ranks that are lost."""
        if self._lost_at is None:
            super().stop_workers()
        else:
            waited = time.monotonic() >= self._lost_at + restart_policy.GRACE_SECONDS
            self.stop_ranks(signal.SIGKILL if waited else signal.SIGTERM, restart_policy.GRACE_SECONDS)

    def report_change(self) -> None:
        """Nothing: :meth:`start_workers` reports what has changed."""

    def monitor_workers(self) -> RanksState:
        """Return the state of the ranks. Restarts them once a machine that trains has left.

        Raises:
            JobInterrupted: the user interrupted the ranks.
            JobEnded: this machine idles, and the job has ended.
        """
        if not self.trains:
            if self._handler.is_closed():
                self._read_end()
                raise JobEnded
            if self._lost():
                self.restart_workers()
            return RanksState.RUNNING
        state = super().monitor_workers()
        if state is RanksState.RUNNING and self._pids and self._lost():
            now = time.monotonic()
            self._lost_at = self._lost_at or now
            # The ranks wait for those that are lost, as they do with NCCL.
            if now >= self._lost_at + restart_policy.GRACE_SECONDS:
                self.restart_workers()
        return state

    def only_follows(self, exited: Mapping[int, int], local_ranks: set[int], outcomes: Mapping[int, Outcome]) -> bool:
        """See :meth:`titan_launch.agent.RankAgent.only_follows`. Ranks that stop in order follow a SIGTERM that another
        machine received; a rank that hangs may wait for another machine only if one has left."""
        orderly = set(exited.values()) <= {0, EXIT_PREEMPTED}
        peers = all(
            status in (0, EXIT_PREEMPTED, -signal.SIGABRT) or (rank in outcomes and outcomes[rank].follows)
            for rank, status in exited.items()
        )
        self._follows = orderly or (peers and (local_ranks == exited.keys() or self._lost()))
        return self._follows

    def leave(self) -> None:
        """Leave the other machines, which then restart at once instead of waiting for this one."""
        with suppress(RendezvousError):  # the others then miss its reports
            self._handler.leave()

    def publish_failure(self, failure: Failure) -> None:
        """Report a failure of this machine's ranks to the other machines, whose ranks fail because of it."""
        self._failed_itself = True
        self._handler.put("failure", {"status": failure.status, "line": failure.lines[-1]})

    def publish_end(self, status: int, line: str) -> None:
        """See :meth:`titan_launch.agent.RankAgent.publish_end`."""
        self._handler.put("end", {"status": status, "line": line})

    def _wait(self, plan: Plan) -> None:
        """Wait until machines join or leave.

        Raises:
            UserError: see :meth:`rendezvous`.
            RendezvousClosed: the job has ended.
        """
        least, most = self._machines
        where, size = f"--nnodes {least}:{most}", len(self._handler.round.members)
        why = f"{size} machine(s) have joined, and {plan.why}"
        if self._when_impossible == "stop":
            raise UserError.one(where, why, "start more machines, or use --elastic wait to wait for them")
        self.console.say(f"waiting for more machines, because {plan.why}")
        until = time.monotonic() + self._options.timeout
        with phase(f"waiting for more machines at {self._options.endpoint}", lambda: f"{size} joined", repeat_seconds=60.0):
            while time.monotonic() < until:
                if self._handler.is_closed():
                    raise RendezvousClosed
                if self._handler.changed():
                    return
                time.sleep(self._poll_seconds)
        fix = f"start more machines; none joined within {self._options.timeout} s (--rdzv-timeout)"
        raise UserError.one(where, why, fix)

    def _lost(self) -> bool:
        """Whether a machine that trains has left since the ranks were started."""
        return not self._trainers <= self._handler.members

    def _read_failure(self, last: Round) -> None:
        """Read what another machine reported about the last round."""
        if last.prefix and not self._failed_itself and (found := self._handler.get("failure", last)) is not None:
            self._blame(found)

    def _read_end(self) -> None:
        """Read how the job has ended on the machine that closed it, and end like that. If no machine has said that it is
        complete, it is lost."""
        found = self._handler.get("end")
        if found is not None:
            if not found["status"]:
                self.failure = None
            elif not self._failed_itself:
                self._blame(found)
            return
        self._read_failure(self._handler.round)
        if self.failure is None:
            why = "error: the job has ended on the other machines, and none says why"
            self.failure = Failure(EXIT_LOST_PEER, (why,))

    def _blame(self, found: Mapping[str, Any]) -> None:
        cause = found["line"].removeprefix("error: ").removeprefix("on another machine: ")
        self._caused_elsewhere = f"on another machine: {cause}"
        self.failure = Failure(found["status"], (f"error: {self._caused_elsewhere}",))


def _changes(before: Collection[Node], now: Collection[Node]) -> str:
    """Return which machines have left and joined."""
    left, joined = set(before) - set(now), set(now) - set(before)
    # A machine that was restarted has left and joined.
    texts = [
        f"{', '.join(sorted({node.addr for node in nodes}))} {verb}"
        for nodes, verb in ((left, "left"), (joined, "joined"))
        if nodes
    ]
    return " and ".join(texts) if before else ""
