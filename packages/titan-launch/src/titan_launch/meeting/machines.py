"""The machines of a job: they meet, agree on who trains, and report to each other how their ranks end."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from titan_core.api import UserError
from titan_core.toolkit.listening import EVERY_ADDRESS, bound_socket
from titan_core.toolkit.status import phase
from titan_launch.meeting.handler import POLL_SECONDS, Handler, Node
from titan_launch.meeting.meeting_point import handler, require_meeting_point
from titan_launch.meeting.rendezvous import LOOPBACK, Rendezvous, RendezvousClosed, RendezvousError
from titan_launch.meeting.sizes import Plan, Sizes, choose
from titan_launch.terminal.console import Console

LAST_CALL_SECONDS = 5.0
"""How long machines that meet again wait for further ones, once the least number has joined. At the first start, when
machines may come later, they wait for 30 s."""
FINISH_SECONDS = 300.0
"""How long a machine whose ranks are complete waits for those of the others."""


class JobEnded(Exception):
    """The job has ended on the other machines."""

    def __init__(self, record: Mapping[str, Any] | None) -> None:
        """
        Args:
            record: what they reported: the exit status, and a line that says why if it is not 0.
        """
        super().__init__()
        self.record = record


@dataclass(frozen=True)
class Place:
    """This machine's part in a round of machines."""

    plan: Plan
    machine: int
    """Number of this machine in the plan."""
    ranks: range
    """Its global ranks."""
    master: tuple[str, int]
    """Where rank 0 serves the store of the ranks."""
    members: tuple[Node, ...] = ()
    """The machines of the round; the first ones train. Empty if this machine meets no other."""
    cause: str = ""
    """What ended the last round, if another machine reported it."""

    @property
    def trains(self) -> bool:
        """Whether this machine trains rather than idles."""
        return self.machine < self.plan.machines


class Machines:
    """The machines of a job, as one of them sees them. A job of one machine meets nobody.

    An elastic job continues without machines that leave, and on more of them when they return. The methods raise
    :class:`~titan_launch.meeting.rendezvous.RendezvousLost` if the store of the rendezvous no longer answers.
    """

    def __init__(
        self,
        options: Rendezvous,
        per_node: int,
        meeting: Handler | None,
        console: Console,
        sizes: Sizes | None = None,
        when_impossible: Literal["wait", "stop"] = "wait",
    ) -> None:
        """
        Args:
            per_node: number of ranks of this machine.
            meeting: meets the other machines; ``None`` if there are none.
            console: shows for whom this machine waits.
            sizes: the numbers of ranks that an elastic job can train on.
            when_impossible: what to do while an elastic job cannot train on the machines that have joined.
        """
        self.options, self._per_node, self._handler, self._console = options, per_node, meeting, console
        self._sizes, self._when_impossible = sizes, when_impossible
        self.elastic = sizes is not None
        self.place: Place | None = None
        """This machine's part in the current round; ``None`` before it, and if the job continues without this machine."""
        self._batch = 0  # the global batch to keep
        self._cause = ""
        self.listener: socket.socket | None = None
        """The bound socket for the store of the ranks if rank 0 runs here, until it has started."""

    def meet(self, has_trained: bool) -> Place:
        """Wait for the other machines until those that have joined can train, and agree with them on a plan.

        Args:
            has_trained: whether ranks of this machine were started before.

        Raises:
            UserError: the wrong number of machines has joined, or no number of them can train and the user has chosen to
                stop, or no further one came in time.
            JobEnded: the job has ended on the other machines.
            RendezvousError: the machines have not met.
        """
        self.place = None
        if self._handler is None:
            bind = self.options.bind or LOOPBACK
            master = self._listen(LOOPBACK if bind in EVERY_ADDRESS else bind, bind)
            self.place = Place(Plan(1, self._per_node), 0, range(self._per_node), master)
            return self.place
        if not self._console.shows_status:
            self._console.show_status()
        least, most = self.options.machines
        size, meeting, before = str(most) if least == most else f"{least} to {most}", self._handler, self._handler.round

        def joined() -> str:
            return f"{len(meeting.state.members)} of {size} joined"

        try:
            with phase(f"waiting for machines at {self.options.endpoint}", joined, repeat_seconds=10.0):
                while (place := self._agree(meeting)) is None:
                    pass
        except RendezvousClosed:
            if not meeting.round.prefix or (has_trained and not self.elastic):
                raise
            raise JobEnded(self._end() if self.elastic else {"status": 0}) from None
        if self.elastic:
            found = meeting.get("failure", before) if before.prefix else None
            cause, self._cause = self._cause or (blamed(found) if found else ""), ""
            place = Place(place.plan, place.machine, place.ranks, place.master, place.members, cause)
        self.place = place
        return place

    def _agree(self, meeting: Handler) -> Place | None:
        """Meet the other machines; return ``None`` if one has left or joined before all agreed, or they cannot train.

        Raises: see :meth:`meet`.
        """
        if self.elastic and not self.options.fixed_last_call and meeting.has_begun:
            meeting.last_call = LAST_CALL_SECONDS
        here = meeting.next_rendezvous()
        least, most = self.options.machines
        size = len(here.members)
        if not least <= size <= most:
            requested = str(least) if least == most else f"{least}:{most}"
            why = f"{size} machine(s) joined the rendezvous"
            raise UserError.one(f"--nnodes {requested}", why, "start titan with the same --nnodes on every machine")
        meeting.put(f"machine/{here.rank}", {"ranks": self._per_node, "batch": self._batch})
        if here.rank == 0:  # it decides for all
            offers = self._await(meeting, [f"machine/{number}" for number in range(size)])
            if offers is None:
                return None
            bind = self.options.bind if self.options.bind is not None else self.options.local_addr or ""
            agreed = {
                "plan": asdict(self._plan(offers)),
                "ranks": [offer["ranks"] for offer in offers],
                "master": self._listen(meeting.node.addr, bind),
            }
            meeting.put("plan", agreed)
        found = self._await(meeting, ["plan"])
        if found is None:
            return None
        plan, counts, (host, port) = Plan(**found[0]["plan"]), found[0]["ranks"], found[0]["master"]
        self._batch = plan.batch or self._batch
        if not plan.machines:
            self._await_more(meeting, plan)
            return None
        first = sum(counts[: here.rank])
        return Place(plan, here.rank, range(first, first + self._per_node), (host, port), here.members)

    def _plan(self, offers: Sequence[Mapping[str, Any]]) -> Plan:
        """Return who trains: all machines, or as many as an elastic job can train on."""
        counts = [offer["ranks"] for offer in offers]
        if self._sizes is None:
            return Plan(len(counts), sum(counts))
        return choose(self._sizes, counts, self.options.machines[0], max(offer["batch"] for offer in offers))

    def _await(self, meeting: Handler, names: Sequence[str]) -> list[Any] | None:
        """Wait for records of the round, and return them; ``None`` if a machine has left or joined meanwhile."""
        found: dict[str, Any] = {}
        while True:
            for name in names:
                if name not in found and (value := meeting.get(name)) is not None:
                    found[name] = value
            if len(found) == len(names):
                return [found[name] for name in names]
            if meeting.changed():
                return None
            time.sleep(POLL_SECONDS)

    def _await_more(self, meeting: Handler, plan: Plan) -> None:
        """Wait until machines join or leave, because the job cannot train on those that are there.

        Raises: see :meth:`meet`.
        """
        least, most = self.options.machines
        where, size = f"--nnodes {least}:{most}", len(meeting.round.members)
        why = f"{size} machine(s) have joined, and {plan.why}"
        if self._when_impossible == "stop":
            raise UserError.one(where, why, "start more machines, or use --elastic wait to wait for them")
        self._console.say(f"waiting for more machines, because {plan.why}")
        until = time.monotonic() + self.options.timeout
        with phase(f"waiting for more machines at {self.options.endpoint}", lambda: f"{size} joined", repeat_seconds=60.0):
            while time.monotonic() < until:
                if meeting.is_closed():
                    raise RendezvousClosed
                if meeting.changed():
                    return
                time.sleep(POLL_SECONDS)
        fix = f"start more machines; none joined within {self.options.timeout} s (--rdzv-timeout)"
        raise UserError.one(where, why, fix)

    def _listen(self, address: str, bind: str) -> tuple[str, int]:
        """Choose the port where rank 0 serves the store of the ranks; return its address.

        Args:
            address: where the ranks find it.
            bind: the address to listen on; ``""`` for all.
        """
        self.stop_listening()
        self.listener = bound_socket(bind)
        return address, self.listener.getsockname()[1]

    def stop_listening(self) -> None:
        """Close the socket of the ranks' store here: rank 0 has it, or is not started."""
        if self.listener is not None:
            self.listener.close()
            self.listener = None

    @property
    def job_ends_here(self) -> bool:
        """Whether the job ends with this machine. An elastic one continues without a machine that waits or idles."""
        return not self.elastic or (self.place is not None and self.place.trains)

    def others_wait(self) -> bool:
        """Whether further machines wait for the next round."""
        return self._handler is not None and self._handler.num_nodes_waiting() > 0

    def lost(self) -> bool:
        """Whether a machine that trains has left an elastic job since this round began."""
        if not self.elastic or self._handler is None or self.place is None:
            return False
        return not set(self.place.members[: self.place.plan.machines]) <= self._handler.members

    def idle(self) -> None:
        """Wait until a machine that trains has left, or another one joins.

        Raises:
            JobEnded: the job has ended.
        """
        assert self._handler is not None
        while not self.lost() and not self.others_wait():
            time.sleep(POLL_SECONDS)
            if self._handler.is_closed():
                raise JobEnded(self._end())

    def await_completion(self) -> None:
        """Wait until the ranks of the other machines are complete too: they may need the store that this one hosts."""
        if self._handler is None or self.place is None:
            return
        end = time.monotonic() + FINISH_SECONDS
        with contextlib.suppress(RendezvousError):  # the ranks of this machine are complete
            self._handler.put(f"done/{self.place.machine}", True)
            others = [f"done/{number}" for number in range(self.place.plan.machines)]
            while others and time.monotonic() < end and not self._handler.changed():
                if self._handler.get(others[0]) is None:
                    time.sleep(POLL_SECONDS)
                else:
                    others.pop(0)

    def report_failure(self, status: int, line: str) -> None:
        """Report a failure of this machine's ranks to the machines of an elastic job, whose ranks fail because of it."""
        if self.elastic and self._handler is not None:
            self._handler.put("failure", {"status": status, "line": line})

    def end_job(self, status: int, line: str) -> None:
        """End the job on all machines.

        Args:
            status: exit status of the job.
            line: why, if it is not 0.
        """
        if self._handler is not None:
            if self.elastic:
                self._handler.put("end", {"status": status, "line": line})
            self._handler.shutdown()

    def leave(self) -> None:
        """Leave the other machines of an elastic job, which then restart at once instead of waiting for this one."""
        if self.elastic and self._handler is not None:
            with contextlib.suppress(RendezvousError):  # the others then miss its reports
                self._handler.leave()

    def reconnect(self) -> None:
        """Connect to the store of the rendezvous once it has returned.

        Raises:
            UserError: it has not returned in time.
        """
        assert self._handler is not None
        self.place = None
        self._handler.stop()
        require_meeting_point(self.options, self.options.timeout)
        self._handler = handler(self.options, self.options.timeout)
        self._cause = "the rendezvous has returned"

    def _end(self) -> Any:
        """Return how the job has ended on the machine that closed it; ``None`` if no machine says why."""
        assert self._handler is not None
        return self._handler.get("end") or self._handler.get("failure")


def blamed(record: Mapping[str, Any]) -> str:
    """Return what a machine reported, as the others print it."""
    cause = record["line"].removeprefix("error: ").removeprefix("on another machine: ")
    return f"on another machine: {cause}"


def changes(before: Collection[Node], now: Collection[Node]) -> str:
    """Return which machines have left and joined; empty if there was none before."""
    left, joined = set(before) - set(now), set(now) - set(before)
    # A machine that was restarted has left and joined.
    texts = [
        f"{', '.join(sorted({node.addr for node in nodes}))} {verb}"
        for nodes, verb in ((left, "left"), (joined, "joined"))
        if nodes
    ]
    return " and ".join(texts) if before else ""
