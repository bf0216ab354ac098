"""Which rank holds the others up, and why: a verdict over the dumps of all ranks. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from titan_debug.flight import words
from titan_debug.flight.dump import Dump
from titan_debug.flight.matching import Channel, Mismatch, Wait, channels, joined_by_all, mismatches, waits
from titan_debug.flight.read import Dumps
from titan_debug.flight.stacks import location, place, waits_in_torch

MOST_ANALYSED = 256
"""Ranks up to which a rank reads the dumps of all while the job still runs."""

Kind = Literal["mismatch", "raised", "died", "behind", "circle", "missing", "all joined", "elsewhere", "nothing"]


@dataclass(frozen=True)
class RankState:
    """What is known of one rank."""

    rank: int
    step: int | None
    state: str
    """In words."""
    host: str = ""
    why: str = ""
    """Why it has dumped."""


@dataclass(frozen=True)
class Analysis:
    """What the dumps of all ranks say together."""

    kind: Kind
    verdict: str
    """One line."""
    culprits: list[int]
    """The ranks that the others' trouble comes from; none where that cannot be told."""
    step: int | None
    """The step that it happened in."""
    details: list[str] = field(default_factory=list)
    """What else is to be said, a line each."""
    ranks: list[RankState] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was left out of the analysis."""

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


@dataclass(frozen=True)
class _Evidence:
    dumps: dict[int, Dump]
    missing: list[int]
    channels: list[Channel]
    waits: list[Wait]
    world_size: int

    @property
    def step(self) -> int | None:
        """The last step that any rank has begun."""
        return max((dump.step for dump in self.dumps.values() if dump.recorded), default=None)

    def waits_of(self, rank: int) -> list[Wait]:
        return [wait for wait in self.waits if wait.rank == rank]


_Finding = tuple[Kind, list[int], str, list[str]]
"""Kind, culprits, verdict, details."""


def analyse(dumps: Dumps) -> Analysis:
    """The verdict. Of several findings the one that explains the others comes first: ranks that disagree on a collective,
    then one that failed by itself, then one that is behind, then one that has left nothing."""
    found = channels(dumps.dumps)
    evidence = _Evidence(
        {dump.rank: dump for dump in dumps.dumps}, dumps.missing, found, waits(dumps.dumps, found), dumps.world_size
    )
    looks: tuple[Callable[[_Evidence], _Finding | None], ...] = (
        _mismatch, _raised, _died, _behind, _missing, _all_joined, _elsewhere,
    )  # fmt: skip
    findings = [finding for look in looks if (finding := look(evidence)) is not None] or [_nothing(evidence)]
    kind, culprits, verdict, details = findings[0]
    others = [f"also: {finding[2]}" for finding in findings[1:] if not set(finding[1]) <= set(culprits)]
    states = [_state(evidence, rank) for rank in range(dumps.world_size)]
    return Analysis(kind, verdict, culprits, evidence.step, [*details, *others], states, dumps.notes)


def _mismatch(evidence: _Evidence) -> _Finding | None:
    found = mismatches(evidence.channels)
    if not found:
        return None
    first = found[0]
    calls = "; ".join(_calls(evidence, first, kind) for kind in first.kinds)
    name = words.group_name(first.channel.group)
    verdict = f"ranks disagree on the {first.what} of collective number {first.seq} of {name}{_in_step(evidence)}: {calls}"
    details = []
    for kind in first.kinds:
        dump, entry = evidence.dumps[kind[0]], first.channel.by_rank[kind[0]][first.seq]
        details += [f"{words.ranks(kind)} called it in", *words.stack_lines(dump, entry.stack)]
    return "mismatch", first.culprits, verdict, details


def _calls(evidence: _Evidence, mismatch: Mismatch, kind: list[int]) -> str:
    called = words.call(mismatch.channel.by_rank[kind[0]][mismatch.seq], evidence.dumps[kind[0]])
    return f"{words.ranks(kind)} {words.verb(kind, 'calls', 'call')} {called}"


def _raised(evidence: _Evidence) -> _Finding | None:
    failed = [dump for dump in evidence.dumps.values() if dump.failure is not None and not dump.failure.follows]
    if not failed:
        return None
    failed.sort(key=lambda dump: dump.failure.time if dump.failure is not None else 0.0)
    first = failed[0]
    assert first.failure is not None
    alike = [dump.rank for dump in failed if dump.failure is not None and dump.failure.type == first.failure.type]
    where = location(first.stacks[first.failure.stack])
    raised = f"{words.ranks(alike)} raised {first.failure.type}{_in_step(evidence)}, at {where}: {first.failure.message}"
    verdict = f"{raised}{_victims(evidence, alike)}"
    return "raised", alike, verdict, words.stack_lines(first, first.failure.stack)


def _died(evidence: _Evidence) -> _Finding | None:
    """A rank that was ended by a signal, but not while it waited: NCCL ends those itself."""
    died = [dump for rank, dump in evidence.dumps.items() if dump.died and not evidence.waits_of(rank)]
    if not died:
        return None
    first = died[0]
    verdict = f"rank {first.rank} died ({first.died}) {place(first.main_stack)}{_in_step(evidence)}"
    peers = [wait for wait in evidence.waits if first.rank in wait.unknown]
    details = [f"its main thread was in {words.main_calls(first)}"] if first.main_stack else []
    if peers and waits_in_torch(first.main_stack):
        wait = peers[0]
        called = words.call(wait.entry, evidence.dumps[wait.rank])
        verdict += f", while rank {wait.rank} was in {words.collective(wait.entry, wait.channel.group)}"
        details.append(f"rank {wait.rank} called {called}")
        details.append("gloo ends a process that is sent more than it expects: compare what the two send")
    else:
        verdict += _victims(evidence, [first.rank])
    return "died", [first.rank], verdict, details


def _behind(evidence: _Evidence) -> _Finding | None:
    blocked = [wait for wait in evidence.waits if wait.behind]
    if not blocked:
        return None
    awaited = {rank for wait in blocked for rank in wait.behind}
    # A rank that is waited for, and waits itself, is held up by another.
    culprits = sorted(rank for rank in awaited if not any(wait.behind for wait in evidence.waits_of(rank)))
    if not culprits:
        circle = "; ".join(_waiting(wait) for wait in blocked)
        verdict = f"{words.ranks(awaited)} wait for each other in a circle{_in_step(evidence)}: {circle}"
        return "circle", sorted(awaited), verdict, [_called(evidence, wait) for wait in blocked]
    wait = next(wait for wait in blocked if set(wait.behind) & set(culprits))
    waiting = sorted(other.rank for other in blocked if other.entry.seq == wait.entry.seq and other.channel is wait.channel)
    named = words.collective(wait.entry, wait.channel.group)
    verdict = (
        f"{words.ranks(culprits)} {words.verb(culprits, 'is', 'are')} behind{_in_step(evidence)}: "
        f"{_places(evidence, culprits)}; {words.ranks(waiting)} {words.verb(waiting, 'has', 'have')} waited "
        f"{_waited(evidence, wait)} for {words.verb(culprits, 'it', 'them')} in {named}"
    )
    details = [_called(evidence, wait)]
    for rank in culprits:
        last = wait.channel.by_rank[rank].get(wait.channel.last(rank)) if rank in wait.channel.by_rank else None
        if last is not None:
            before = words.collective(last, wait.channel.group)
            now = words.main_calls(evidence.dumps[rank])
            details.append(f"rank {rank} joined {before} last; its main thread is in {now}")
    return "behind", culprits, verdict, details


def _missing(evidence: _Evidence) -> _Finding | None:
    if not evidence.missing:
        return None
    gone = evidence.missing
    verdict = (
        f"{words.ranks(gone)} left no dump{_in_step(evidence)}: {words.verb(gone, 'it was', 'they were')} killed, or "
        f"{words.verb(gone, 'its files are', 'their files are')} not here{_victims(evidence, gone)}"
    )
    return "missing", gone, verdict, [_called(evidence, wait) for wait in evidence.waits if set(wait.unknown) & set(gone)]


def _all_joined(evidence: _Evidence) -> _Finding | None:
    together = joined_by_all(list(evidence.dumps.values()), evidence.channels)
    if not together:
        return None
    channel, entry, inside = together[0]
    named = words.collective(entry, channel.group)
    verdict = (
        f"no rank is behind{_in_step(evidence)}: all have joined {named}, and {words.ranks(inside)} "
        f"{words.verb(inside, 'is', 'are')} not through it; if that lasts, look at the network and the devices"
    )
    return "all joined", [], verdict, [f"rank {inside[0]} called {words.call(entry, evidence.dumps[inside[0]])}"]


def _elsewhere(evidence: _Evidence) -> _Finding | None:
    """By the stacks alone: gloo records neither sends nor receives, which pipelines wait in."""
    inside = [rank for rank, dump in evidence.dumps.items() if waits_in_torch(dump.main_stack)]
    outside = [rank for rank in evidence.dumps if rank not in inside]
    if not inside or not outside:
        return None
    waiting = f"; {words.ranks(inside)} {words.verb(inside, 'waits', 'wait')} in torch.distributed"
    verdict = (
        f"{words.ranks(outside)} {words.verb(outside, 'is', 'are')} elsewhere{_in_step(evidence)}: "
        f"{_places(evidence, outside)}{_victims(evidence, outside) or waiting}"
    )
    return "elsewhere", outside, verdict, [f"rank {rank}: {words.main_calls(evidence.dumps[rank])}" for rank in inside]


def _nothing(evidence: _Evidence) -> _Finding:
    return "nothing", [], f"no rank waits for another{_in_step(evidence)}", []


def _state(evidence: _Evidence, rank: int) -> RankState:
    dump = evidence.dumps.get(rank)
    if dump is None:
        return RankState(rank, None, "left no dump")
    states = []
    if dump.failure is not None:
        states.append(f"raised {dump.failure.type}{', as another rank was gone or late' if dump.failure.follows else ''}")
    if dump.died:
        states.append(f"died ({dump.died})")
    states += [_waiting(wait).partition(" ")[2].partition(" ")[2] for wait in evidence.waits_of(rank)]
    states.append(f"main thread {place(dump.main_stack)}")
    return RankState(rank, dump.step if dump.recorded else None, "; ".join(states), dump.host, dump.why)


def _in_step(evidence: _Evidence) -> str:
    return f" in step {evidence.step}" if evidence.step is not None else ""


def _waiting(wait: Wait) -> str:
    """``rank 0 waits for rank 1 in all_reduce ...``."""
    absent = words.ranks([*wait.behind, *wait.unknown])
    return f"rank {wait.rank} waits for {absent} in {words.collective(wait.entry, wait.channel.group)}"


def _called(evidence: _Evidence, wait: Wait) -> str:
    return f"rank {wait.rank} called {words.call(wait.entry, evidence.dumps[wait.rank])}"


def _waited(evidence: _Evidence, wait: Wait) -> str:
    """How long a rank had waited when it wrote its dump: one that was asked for in passing is not of a hang."""
    return f"{max(0.0, evidence.dumps[wait.rank].time - wait.entry.created):.1f} s"


def _victims(evidence: _Evidence, culprits: Sequence[int]) -> str:
    """Who failed or waits because of ``culprits``, as the end of a sentence."""
    victims = [
        wait for wait in evidence.waits if wait.rank not in culprits and set(culprits) & {*wait.behind, *wait.unknown}
    ]
    if victims:
        alike = sorted({one.rank for one in victims if one.channel is victims[0].channel})
        named = words.collective(victims[0].entry, victims[0].channel.group)
        return f"; {words.ranks(alike)} {words.verb(alike, 'was', 'were')} left waiting in {named}"
    failed = [rank for rank, dump in evidence.dumps.items() if dump.failure is not None and dump.failure.follows]
    return f"; {words.ranks(failed)} failed because of that" if failed else ""


def _places(evidence: _Evidence, culprits: Iterable[int]) -> str:
    """Where each rank is; ranks that are at one place together."""
    at: dict[str, list[int]] = {}
    for rank in culprits:
        at.setdefault(place(evidence.dumps[rank].main_stack), []).append(rank)
    if len(at) == 1:
        where, alike = next(iter(at.items()))
        return f"{words.verb(alike, 'it is', 'they are')} {where}"
    return "; ".join(f"{words.ranks(alike)} {words.verb(alike, 'is', 'are')} {where}" for where, alike in at.items())
