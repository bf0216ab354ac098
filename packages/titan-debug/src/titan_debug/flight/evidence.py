"""Evidence from all ranks' dumps: which ranks wait for which, and how to say so. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from titan_debug.flight import words
from titan_debug.flight.dump import Dump, Dumps
from titan_debug.flight.matching import Channel, Wait, channels, undone, waits, waits_for_peers
from titan_debug.flight.stacks import place, waits_in_torch


@dataclass(frozen=True)
class Evidence:
    """The facts that every diagnosis draws on."""

    dumps: dict[int, Dump]
    missing: list[int]
    """Ranks without a dump."""
    training: list[Channel]
    background: list[Channel]
    """Channels of background groups, which may lag without harm."""
    waits: list[Wait]
    """Waits in training."""
    met: list[Wait]
    """Sends and receives that both sides have started and that are still pending."""
    background_waits: list[Wait]

    @classmethod
    def of(cls, dumps: Dumps) -> Evidence:
        """Return the evidence in ``dumps``."""
        found = channels(dumps.dumps)
        training = [channel for channel in found if not channel.group.background]
        background = [channel for channel in found if channel.group.background]
        for_peers, met = waits_for_peers(dumps.dumps)
        waiting = [*waits(dumps.dumps, training), *for_peers]
        by_rank = {dump.rank: dump for dump in dumps.dumps}
        return cls(by_rank, dumps.missing, training, background, waiting, met, waits(dumps.dumps, background))

    @property
    def step(self) -> int | None:
        """The last step that any rank started."""
        return max((dump.step for dump in self.dumps.values()), default=None)

    def waits_of(self, rank: int) -> list[Wait]:
        """Return the waits of ``rank`` in training."""
        return [wait for wait in self.waits if wait.rank == rank]

    def blocked(self, rank: int) -> bool:
        """Whether ``rank`` itself waits for other ranks or has lost one. That rank is only a link in the chain, even if it
        is unknown which rank it waits for."""
        dump = self.dumps[rank]
        within = any(dump.training(entry) for entry in undone(dump))  # possibly joined by all, and completed by none
        return within or dump.lost or bool(self.waits_of(rank)) or waits_in_torch(dump.main_stack)

    @cached_property
    def late(self) -> list[int]:
        """Ranks that others wait for and that wait for no rank themselves."""
        return sorted(rank for rank in {rank for wait in self.waits for rank in wait.behind} if not self.blocked(rank))

    @cached_property
    def circle(self) -> list[int]:
        """Ranks that wait for each other; empty if there is no deadlock."""
        left = {wait.rank for wait in self.waits}
        while True:
            within = [wait for wait in self.waits if wait.rank in left and left.intersection(wait.behind)]
            kept = {wait.rank for wait in within} & {rank for wait in within for rank in wait.behind}
            if kept == left:
                return sorted(left)
            left = kept


def in_step(evidence: Evidence) -> str:
    """Return `` in step N``, or an empty string if the step is unknown."""
    return f" in step {evidence.step}" if evidence.step is not None else ""


def waiting(wait: Wait) -> str:
    """Return ``rank 0 waits for rank 1 in all_reduce ...``."""
    return f"rank {wait.rank} {waiting_for(wait)}"


def waiting_for(wait: Wait) -> str:
    """Return ``waits for rank 1 in all_reduce ...``."""
    absent = words.ranks([*wait.behind, *wait.unknown])
    return f"waits for {absent} in {words.collective(wait.entry, wait.channel.group)}"


def called(evidence: Evidence, wait: Wait) -> str:
    """Return the call that the waiting rank made, with its location."""
    return f"rank {wait.rank} called {words.call(wait.entry, evidence.dumps[wait.rank])}"


def waited(evidence: Evidence, wait: Wait) -> str:
    """Return how long the rank had waited when it wrote its dump. A short time suggests a dump of a healthy job."""
    return f"{max(0.0, evidence.dumps[wait.rank].time - wait.entry.created):.1f} s"


def victims(evidence: Evidence, culprits: Sequence[int]) -> str:
    """Return the end of a sentence that names the ranks that fail or wait because of ``culprits``."""
    left = [wait for wait in evidence.waits if wait.rank not in culprits and set(culprits) & {*wait.behind, *wait.unknown}]
    if left:
        alike = sorted({wait.rank for wait in left if wait.channel is left[0].channel})
        named = words.collective(left[0].entry, left[0].channel.group)
        return f"; {words.ranks(alike)} {words.verb(alike, 'was', 'were')} left waiting in {named}"
    failed = [rank for rank, dump in evidence.dumps.items() if dump.lost]
    return f"; {words.ranks(failed)} failed as a consequence" if failed else ""


def places(evidence: Evidence, culprits: Iterable[int]) -> str:
    """Return where each rank is. Ranks at the same place share a clause."""
    at: dict[str, list[int]] = {}
    for rank in culprits:
        at.setdefault(place(evidence.dumps[rank].main_stack), []).append(rank)
    if len(at) == 1:
        where, alike = next(iter(at.items()))
        return f"{words.verb(alike, 'it is', 'they are')} {where}"
    return "; ".join(f"{words.ranks(alike)} {words.verb(alike, 'is', 'are')} {where}" for where, alike in at.items())
