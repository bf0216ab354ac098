"""What the dumps of all ranks say together: who waits for whom, and the words for it. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from titan_debug.flight import words
from titan_debug.flight.dump import Dump
from titan_debug.flight.matching import Channel, Wait, channels, waits
from titan_debug.flight.p2p import undone, waits_for_peers
from titan_debug.flight.read import Dumps
from titan_debug.flight.stacks import place, waits_in_torch


@dataclass(frozen=True)
class Evidence:
    """What all looks look at."""

    dumps: dict[int, Dump]
    missing: list[int]
    """Ranks that have left nothing."""
    training: list[Channel]
    background: list[Channel]
    """Those of groups for work beside training, which may lag as it likes."""
    waits: list[Wait]
    """In training."""
    met: list[Wait]
    """Sends and receives that both sides have begun, and that are not over."""
    background_waits: list[Wait]

    @classmethod
    def of(cls, dumps: Dumps) -> Evidence:
        """What ``dumps`` say."""
        found = channels(dumps.dumps)
        training = [channel for channel in found if not channel.group.background]
        background = [channel for channel in found if channel.group.background]
        for_peers, met = waits_for_peers(dumps.dumps)
        waiting = [*waits(dumps.dumps, training), *for_peers]
        by_rank = {dump.rank: dump for dump in dumps.dumps}
        return cls(by_rank, dumps.missing, training, background, waiting, met, waits(dumps.dumps, background))

    @property
    def step(self) -> int | None:
        """The last step that any rank has begun."""
        return max((dump.step for dump in self.dumps.values() if dump.step_known), default=None)

    def waits_of(self, rank: int) -> list[Wait]:
        """What ``rank`` waits for, in training."""
        return [wait for wait in self.waits if wait.rank == rank]

    def held(self, rank: int) -> bool:
        """Whether ``rank`` itself waits for others, or has lost one: it is then no more than a link of the chain, even where
        it is unknown for whom."""
        dump = self.dumps[rank]
        within = any(dump.training(entry) for entry in undone(dump))  # others may have joined it, and be no further either
        # One that was dumped before it failed is judged by that: it may have been late, and lost the others by it.
        lost = dump.lost and dump.failure is not None and dump.stacks[dump.failure.stack] is dump.main_stack
        return within or lost or bool(self.waits_of(rank)) or waits_in_torch(dump.main_stack)

    @cached_property
    def late(self) -> list[int]:
        """Ranks that others wait for, and that wait for nobody."""
        return sorted(rank for rank in {rank for wait in self.waits for rank in wait.behind} if not self.held(rank))

    @cached_property
    def circle(self) -> list[int]:
        """Ranks that wait for each other; empty where there are none."""
        left = {wait.rank for wait in self.waits}
        while True:
            within = [wait for wait in self.waits if wait.rank in left and left.intersection(wait.behind)]
            kept = {wait.rank for wait in within} & {rank for wait in within for rank in wait.behind}
            if kept == left:
                return sorted(left)
            left = kept


def in_step(evidence: Evidence) -> str:
    """When it was, as the middle of a sentence; empty where that is not known."""
    return f" in step {evidence.step}" if evidence.step is not None else ""


def waiting(wait: Wait) -> str:
    """``rank 0 waits for rank 1 in all_reduce ...``."""
    absent = words.ranks([*wait.behind, *wait.unknown])
    return f"rank {wait.rank} waits for {absent} in {words.collective(wait.entry, wait.channel.group)}"


def called(evidence: Evidence, wait: Wait) -> str:
    """What the rank that waits has called, and where."""
    return f"rank {wait.rank} called {words.call(wait.entry, evidence.dumps[wait.rank])}"


def waited(evidence: Evidence, wait: Wait) -> str:
    """How long a rank had waited when it wrote its dump: one that was requested in passing is not of a hang."""
    return f"{max(0.0, evidence.dumps[wait.rank].time - wait.entry.created):.1f} s"


def victims(evidence: Evidence, culprits: Sequence[int]) -> str:
    """Who failed or waits because of ``culprits``, as the end of a sentence."""
    left = [wait for wait in evidence.waits if wait.rank not in culprits and set(culprits) & {*wait.behind, *wait.unknown}]
    if left:
        alike = sorted({one.rank for one in left if one.channel is left[0].channel})
        named = words.collective(left[0].entry, left[0].channel.group)
        return f"; {words.ranks(alike)} {words.verb(alike, 'was', 'were')} left waiting in {named}"
    failed = [rank for rank, dump in evidence.dumps.items() if dump.lost]
    return f"; {words.ranks(failed)} failed because of that" if failed else ""


def places(evidence: Evidence, culprits: Iterable[int]) -> str:
    """Where each rank is; ranks that are at one place together."""
    at: dict[str, list[int]] = {}
    for rank in culprits:
        at.setdefault(place(evidence.dumps[rank].main_stack), []).append(rank)
    if len(at) == 1:
        where, alike = next(iter(at.items()))
        return f"{words.verb(alike, 'it is', 'they are')} {where}"
    return "; ".join(f"{words.ranks(alike)} {words.verb(alike, 'is', 'are')} {where}" for where, alike in at.items())
