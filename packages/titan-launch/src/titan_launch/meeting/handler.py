"""How the machines of a job meet: who has joined, in which round, and who still answers.

They share one record in a torch store, which each changes by compare and swap, and each has one more that it counts up while
it runs. Torch's own rendezvous pickles this state, so that anyone who reaches the store runs code on all machines;
here, records that the job's key did not sign are repaired (see ``signed_store``). No clocks are compared.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from titan_core.api import UserError
from titan_launch.meeting.rendezvous import Rendezvous, RendezvousClosed, RendezvousLost, RendezvousTimeout
from titan_launch.meeting.signed_store import Forged, SignedStore

POLL_SECONDS = 0.1
"""Between two looks at the store while a machine waits."""
REFUSE_SECONDS = 5.0
"""How long a machine that joins waits for others to repair a record that its key did not sign."""
FAREWELL_SECONDS = 5.0
"""How long the host of the store waits for other machines to see that the job has ended."""
_STATE = "state"


@dataclass(frozen=True, order=True)
class Node:
    """One machine, from the start of its launcher to its end."""

    addr: str
    """Where the others reach it."""
    id: str
    """Random: a launcher that is started again is another machine."""


@dataclass(frozen=True)
class State:
    """What the machines share."""

    job: str
    """Random: a job that uses the store after another one reads none of its records."""
    sequence: int = 0
    """Counts changes, so that an old state is known as such."""
    round: int = 0
    members: tuple[Node, ...] = ()
    """Machines of this round; sorted, they are its group ranks."""
    waiting: tuple[Node, ...] = ()
    """Machines for the next round."""
    complete: bool = False
    closed: bool = False

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> State:
        """Return the state of its JSON."""
        nodes = {name: tuple(Node(*node) for node in value[name]) for name in ("members", "waiting")}
        return cls(**{**value, **nodes})

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of the state."""
        nodes = {name: [[node.addr, node.id] for node in getattr(self, name)] for name in ("members", "waiting")}
        return {**asdict(self), **nodes}

    def joined(self, node: Node, most: int) -> State:
        """Return the state with one more member. The last one that may join completes the round."""
        members = (*self.members, node)
        state = replace(self, members=members, waiting=tuple(one for one in self.waiting if one != node))
        return state.completed() if len(members) == most else state

    def completed(self) -> State:
        """Return the state in which the members of this round have met."""
        return replace(self, members=tuple(sorted(self.members)), complete=True)

    def reopened(self) -> State:
        """Return the state of another job, once this one is closed."""
        if not self.closed:
            return self
        return replace(self, job=secrets.token_hex(8), round=self.round + 1, closed=False, complete=False)

    def without(self, gone: set[Node]) -> State:
        """Return the state without some machines. The next round begins when all have left this one."""
        members, waiting = (tuple(one for one in nodes if one not in gone) for nodes in (self.members, self.waiting))
        state = replace(self, members=members, waiting=waiting)
        return replace(state, round=self.round + 1, complete=False) if self.complete and not members else state


@dataclass(frozen=True)
class Round:
    """Machines that have met."""

    rank: int
    """Number of this machine among them."""
    members: tuple[Node, ...]
    prefix: str
    """Of the names of its records."""


class Handler:
    """This machine's part in the rendezvous of a job.

    The methods raise :class:`RendezvousLost` if the store no longer answers.
    """

    def __init__(self, options: Rendezvous, connect: Callable[[], Any], server: Any = None) -> None:
        """Connect to the store.

        Args:
            connect: returns a new connection.
            server: the store, if this machine hosts it.

        Raises:
            UserError: the machines that have met there use another key.
        """
        self._options, self._server = options, server
        self.node = Node(options.address, secrets.token_hex(8))
        self.last_call: float = options.last_call
        """Seconds that machines wait for further ones, once the least number has joined."""
        self.round = Round(0, (), "")
        """The last round of this machine."""
        self._published: dict[str, bytes] = {}  # this machine's records of the round, by their place in the store
        self._text: bytes | None = None
        self._state: State | None = None
        self._counts: dict[Node, int] = {}  # the reports of the other machines
        self._silent: dict[Node, float] = {}  # seconds without a further one
        self._looked = 0.0
        with self._reaching():
            store = connect()
            self._records = SignedStore(store, options.key, options.run_id)
            self._store = store
            self._reports = _Reports(self, connect())
            self._first_look()
        self._reports.start()

    @property
    def state(self) -> State:
        """The state as of the last look at the store."""
        assert self._state is not None
        return self._state

    @property
    def members(self) -> frozenset[Node]:
        """The machines of the current round, as of the last look."""
        return frozenset(self.state.members)

    @property
    def has_begun(self) -> bool:
        """Whether machines have met before."""
        return self.state.complete or self.state.round > 0

    def reopen(self) -> None:
        """Open a rendezvous for a new job if an earlier one has closed it and none of its machines is left. Waits until the
        last report of one that was killed is too old to count."""
        before = dict(self._counts)
        while self.state.closed:
            if not self.state.members and not self.state.waiting:
                self._change(State.reopened)
                return
            time.sleep(POLL_SECONDS)
            self._look()
            if any(before.get(node, count) != count for node, count in self._counts.items()):
                return  # it still runs
            before = dict(self._counts)

    def next_rendezvous(self) -> Round:
        """Wait for other machines, and return those of the next round.

        Raises:
            RendezvousTimeout: too few have joined in time.
            RendezvousClosed: the job has ended.
        """
        options = self._options
        self._change(lambda state: state.without({self.node}))
        deadline = time.monotonic() + options.timeout
        enough, spare = 0.0, False
        while True:
            self._look()
            state, now = self.state, time.monotonic()
            if state.closed:
                if spare and not self.round.members:  # the records of the round say how the job has ended
                    self.round = Round(-1, state.members, self._prefix())
                raise RendezvousClosed
            if state.complete and self.node in state.members:
                break
            if state.complete and len(state.members) >= options.machines[1]:
                deadline, spare = now + options.timeout, True  # the job has as many machines as it may
            if now > deadline:
                self._change(lambda state: state.without({self.node}))
                raise RendezvousTimeout
            if len(state.members) < options.machines[0]:
                enough = 0.0
            elif not state.complete and self.node in state.members:
                enough = enough or now
                if now - enough >= self.last_call:
                    self._change(lambda state: state if state.complete else state.completed())
                    continue
            if self.node not in (state.waiting if state.complete else state.members):
                self._change(self._join)
                continue
            time.sleep(POLL_SECONDS)
        self._published = {}
        self.round = Round(state.members.index(self.node), state.members, self._prefix())
        return self.round

    def _prefix(self) -> str:
        return f"{self.state.job}/{self.state.round}/"

    def _join(self, state: State) -> State:
        if state.closed or self.node in state.members:
            return state
        if not state.complete:
            return state.joined(self.node, self._options.machines[1])
        return state if self.node in state.waiting else replace(state, waiting=(*state.waiting, self.node))

    def num_nodes_waiting(self) -> int:
        """Return how many machines the next round would add."""
        self._look()
        full = self.state.complete and len(self.state.members) >= self._options.machines[1]
        return 0 if full else len(self.state.waiting)

    def changed(self) -> bool:
        """Whether machines have left the current round, or wait for the next one."""
        return self.num_nodes_waiting() > 0 or self.state.members != self.round.members

    def is_closed(self) -> bool:
        """Whether the job has ended."""
        self._look()
        return self.state.closed

    def put(self, name: str, value: Any) -> None:
        """Publish a record of the current round to its machines."""
        name = self.round.prefix + name
        with self._reaching():
            self._records.write(name, value)
        self._published[self._records.place(name)] = self._records.sealed(name, value)

    def get(self, name: str, of: Round | None = None) -> Any:
        """Return a record of the current round, or of an earlier one; ``None`` if there is none."""
        with self._reaching():
            return self._records.read((of or self.round).prefix + name)

    def leave(self) -> None:
        """Leave the other machines, which then do not wait for this one."""
        self._change(lambda state: state.without({self.node}))
        self.stop()

    def shutdown(self) -> None:
        """End the job on all machines. The host of the store waits a moment until they have seen it."""
        self._change(lambda state: replace(state.without({self.node}), closed=True))
        end = time.monotonic() + FAREWELL_SECONDS
        while self._server is not None and (self.state.members or self.state.waiting) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            self._look()
        self.stop()

    def stop(self) -> None:
        """Stop reporting to the others."""
        self._reports.stop()

    def _first_look(self) -> None:
        """Read the state, or write the first one.

        Raises:
            UserError: the key of this machine did not sign it, nor does another machine repair it.
        """
        end = time.monotonic() + REFUSE_SECONDS
        while self._state is None:
            text = self._records.text(_STATE)
            if text is None:
                text = self._records.sealed(_STATE, State(secrets.token_hex(8)).to_json())
                if not self._records.replace(_STATE, None, text):
                    continue
            try:
                self._text, self._state = text, State.of(self._records.opened(_STATE, text))
            except Forged:
                if time.monotonic() < end:
                    time.sleep(POLL_SECONDS)
                    continue
                why = "the job key of this machine differs from that of the machines that have met there"
                fix = f"give every machine the same key, or use another --rdzv-id (now {self._options.run_id})"
                raise UserError.one(f"--rdzv-endpoint {self._options.endpoint}", why, fix) from None

    def _look(self) -> None:
        """Read the state, and drop machines that no longer report."""
        with self._reaching():
            self._read()
            now = time.monotonic()
            interval = self._options.interval
            since, others = now - self._looked, self._others()
            if since < min(1.0, interval) / 2 or not others:
                return
            self._looked = now
            for node, count in zip(others, self._count(others), strict=True):
                # A machine that was stopped itself has missed reports, so that a long pause counts as a short one.
                silent = self._silent.get(node, 0.0) + min(since, interval)
                new = count is not None and count > self._counts.get(node, -1)
                self._silent[node] = 0.0 if new else silent
                if new:
                    self._counts[node] = count
        lost = {node for node in others if self._silent[node] > self._options.lost_after}
        if lost:
            self._change(lambda state: state.without(lost))

    def _others(self) -> list[Node]:
        return [node for node in (*self.state.members, *self.state.waiting) if node != self.node]

    def _count(self, nodes: Sequence[Node]) -> list[Any]:
        """Return the last report of each machine; ``None`` if it has none."""
        names = [f"reports/{node.id}" for node in nodes]
        places = [self._records.place(name) for name in names]
        if not self._store.check(places):
            return [self._records.read(name) for name in names]
        found: list[Any] = []
        for name, text in zip(names, self._store.multi_get(places), strict=True):
            try:
                found.append(self._records.opened(name, text))
            except Forged:
                found.append(None)
        return found

    def _read(self) -> None:
        """Read the state. Repair it if it was forged, is an old one, or is missing."""
        while (text := self._records.text(_STATE)) != self._text:
            state, known = None, self.state
            with suppress(Forged):
                state = None if text is None else State.of(self._records.opened(_STATE, text))
            # Once a job is closed, another one may open it anew.
            if state is not None and (known.closed or (state.job == known.job and state.sequence >= known.sequence)):
                self._text, self._state = text, state
                return
            assert self._text is not None
            self._records.replace(_STATE, text, self._text)

    def _change(self, change: Callable[[State], State]) -> None:
        """Change the state, however many other machines do so at the same time."""
        with self._reaching():
            while True:
                self._read()
                new = change(self.state)
                if new == self.state:
                    return
                new = replace(new, sequence=new.sequence + 1)
                text = self._records.sealed(_STATE, new.to_json())
                if self._records.replace(_STATE, self._text, text):
                    self._text, self._state = text, new
                    return

    def report(self, store: Any, count: int) -> None:
        """Tell the others that this machine runs, and repair its records of the round."""
        name = f"reports/{self.node.id}"
        records = {self._records.place(name): self._records.sealed(name, count), **self._published}
        store.multi_set(list(records), list(records.values()))

    @property
    def interval(self) -> float:
        """Seconds between two reports."""
        return self._options.interval

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        from torch.distributed import DistError

        try:
            yield
        except DistError as error:
            raise RendezvousLost(str(error)) from error


class _Reports(threading.Thread):
    """Reports that this machine runs, on a connection of its own: a request that waits holds up all others on the same."""

    def __init__(self, handler: Handler, store: Any) -> None:
        super().__init__(name="rendezvous reports", daemon=True)
        self._handler, self._store, self._ended = handler, store, threading.Event()
        handler.report(store, 0)  # before this machine joins, so that others find a report

    def run(self) -> None:
        from torch.distributed import DistError

        count = 0
        while not self._ended.wait(self._handler.interval):
            count += 1
            try:
                self._handler.report(self._store, count)
            except DistError:
                return  # the launcher notices it when it looks at the store

    def stop(self) -> None:
        self._ended.set()
        if self.is_alive():
            self.join(FAREWELL_SECONDS)  # a store that is stopped answers no request
