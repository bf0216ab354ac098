"""The verdict over all ranks' dumps: which rank holds up the others, and why. One function diagnoses each kind of problem.
Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from titan_debug.flight import words
from titan_debug.flight.dump import Dumps
from titan_debug.flight.evidence import Evidence, called, in_step, places, victims, waited, waiting, waiting_for
from titan_debug.flight.matching import Mismatch, joined_by_all, mismatches
from titan_debug.flight.stacks import place

Kind = Literal[
    "mismatch",
    "behind",
    "circle",
    "missing",
    "all joined",
    "elsewhere",
    "not recorded",
    "background",
    "nothing",
]


class Diagnosis(NamedTuple):
    """One problem that the dumps show."""

    kind: Kind
    culprits: list[int]
    """The ranks that caused it; empty if unknown."""
    verdict: str
    """One line."""
    details: list[str]


@dataclass(frozen=True)
class RankState:
    """Summary of one rank."""

    rank: int
    step: int | None
    state: str
    """What the rank was doing, in words."""
    host: str = ""
    why: str = ""
    """The reason for its dump."""


@dataclass(frozen=True)
class Analysis:
    """The result of analysing all ranks' dumps."""

    kind: Kind
    verdict: str
    """One line."""
    culprits: list[int]
    """The ranks that caused the problem; empty if unknown."""
    step: int | None
    """The step in which it happened."""
    details: list[str] = field(default_factory=list)
    """Further findings, one line each."""
    ranks: list[RankState] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Dumps that the analysis ignored, and why."""

    def as_dict(self) -> dict[str, Any]:
        """Return the analysis as JSON-compatible values."""
        return asdict(self)


def analyse(dumps: Dumps) -> Analysis:
    """Return the verdict. Of several diagnoses it is the one that explains the others."""
    evidence = Evidence.of(dumps)
    first, *rest = diagnose(evidence)
    others = (other for other in rest if not other.culprits or not set(other.culprits) <= set(first.culprits))
    also = [f"also: {other.verdict}" for other in others]
    states = [_state(evidence, rank) for rank in range(dumps.world_size)]
    return Analysis(first.kind, first.verdict, first.culprits, evidence.step, [*first.details, *also], states, dumps.notes)


def _state(evidence: Evidence, rank: int) -> RankState:
    dump = evidence.dumps.get(rank)
    if dump is None:
        return RankState(rank, None, "left no dump")
    in_background = [wait for wait in evidence.background_waits if wait.rank == rank]
    states = [waiting_for(wait) for wait in [*evidence.waits_of(rank), *in_background]]
    # The stack of a rank that lost another is that of its dump.
    states.append("failed because another rank was gone or late" if dump.lost else f"main thread {place(dump.main_stack)}")
    return RankState(rank, dump.step, "; ".join(states), dump.host, dump.why)


def diagnose(evidence: Evidence) -> Iterator[Diagnosis]:
    """Yield every diagnosis that applies, causes before consequences: ranks that disagree on a collective, then a rank that
    is late or left no dump. A process that is gone closes its connections, so if any
    rank lost a peer, a missing dump explains more than a late rank. Background work counts only if nothing else applies."""
    lost = any(dump.lost for dump in evidence.dumps.values())
    gone_or_late = (_missing, _behind) if lost else (_behind, _missing)
    checks = (_mismatch, *gone_or_late, _deadlock, _all_joined, _elsewhere)
    found = [diagnosis for check in checks if (diagnosis := check(evidence)) is not None]
    yield from found or [_not_recorded(evidence) or _background(evidence) or _nothing(evidence)]


def _mismatch(evidence: Evidence) -> Diagnosis | None:
    found = mismatches(evidence.training) or mismatches(evidence.background)
    if not found:
        return None
    first = found[0]
    calls = "; ".join(_calls(evidence, first, kind) for kind in first.kinds)
    name = words.group_name(first.channel.group)
    verdict = f"ranks disagree on the {first.what} of collective #{first.seq} on {name}{in_step(evidence)}: {calls}"
    details = []
    for kind in first.kinds:
        dump, entry = evidence.dumps[kind[0]], first.channel.by_rank[kind[0]][first.seq]
        details += [f"call on {words.ranks(kind)}:", *words.stack_lines(dump, entry.stack)]
    return Diagnosis("mismatch", first.culprits, verdict, details)


def _calls(evidence: Evidence, mismatch: Mismatch, kind: list[int]) -> str:
    first = kind[0]
    return f"{words.ranks(kind)} called {words.call(mismatch.channel.by_rank[first][mismatch.seq], evidence.dumps[first])}"


def _behind(evidence: Evidence) -> Diagnosis | None:
    late = evidence.late
    if not late:
        return None
    blocked = [wait for wait in evidence.waits if set(wait.behind) & set(late)]
    wait = blocked[0]
    alike = sorted({other.rank for other in blocked if other.channel is wait.channel and other.entry.seq == wait.entry.seq})
    awaited = sorted(set(wait.behind) & set(late))
    for_whom = words.verb(late, "it", "them") if awaited == late else words.ranks(awaited)
    verdict = (
        f"{words.ranks(late)} {words.verb(late, 'is', 'are')} behind{in_step(evidence)}: "
        f"{places(evidence, late)}; {words.ranks(alike)} {words.verb(alike, 'has', 'have')} waited "
        f"{waited(evidence, wait)} for {for_whom} in {words.collective(wait.entry, wait.channel.group)}"
    )
    details = [called(evidence, wait)]
    for rank in late:
        last = wait.channel.by_rank[rank].get(wait.channel.last(rank)) if rank in wait.channel.by_rank else None
        if last is not None:
            before = words.collective(last, wait.channel.group)
            now = words.main_calls(evidence.dumps[rank])
            details.append(f"rank {rank} last joined {before}; its main thread is in {now}")
    if evidence.missing:
        verdict += f"; {_gone(evidence.missing)}"
    return Diagnosis("behind", sorted([*late, *evidence.missing]), verdict, details)


def _missing(evidence: Evidence) -> Diagnosis | None:
    gone, late = evidence.missing, evidence.late
    if not gone:
        return None
    verdict = f"{_gone(gone, in_step(evidence))}{victims(evidence, gone)}"
    if late:  # either merely slow, or the peer that the others have lost
        verdict += f"; {words.ranks(late)} {words.verb(late, 'is', 'are')} behind: {places(evidence, late)}"
    details = [called(evidence, wait) for wait in evidence.waits if set(wait.unknown) & set(gone)]
    return Diagnosis("missing", sorted([*gone, *late]), verdict, details)


def _gone(gone: list[int], when: str = "") -> str:
    return (
        f"{words.ranks(gone)} left no dump{when}: {words.verb(gone, 'it was', 'they were')} killed or "
        f"stuck where Python cannot run, or {words.verb(gone, 'its dump is', 'their dumps are')} not in this folder"
    )


def _deadlock(evidence: Evidence) -> Diagnosis | None:
    circle = evidence.circle
    if not circle or evidence.late or evidence.missing:  # a late or missing rank may be the end of the chain
        return None
    waits = [wait for wait in evidence.waits if wait.rank in circle and set(wait.behind) & set(circle)]
    calls = "; ".join(waiting(wait) for wait in waits)
    verdict = f"{words.ranks(circle)} are deadlocked{in_step(evidence)}: {calls}"
    return Diagnosis("circle", circle, verdict, [called(evidence, wait) for wait in waits])


def _all_joined(evidence: Evidence) -> Diagnosis | None:
    if evidence.late or evidence.circle or evidence.missing or mismatches(evidence.training):
        return None
    together = joined_by_all(list(evidence.dumps.values()), evidence.training)
    if together:
        channel, entry, inside = together[0]
    elif evidence.met:
        channel, entry = evidence.met[0].channel, evidence.met[0].entry
        inside = sorted({wait.rank for wait in evidence.met if wait.channel is channel})
    else:
        return None
    named = words.collective(entry, channel.group)
    verdict = (
        f"no rank is behind{in_step(evidence)}: all joined {named}, but {words.ranks(inside)} "
        f"{words.verb(inside, 'has', 'have')} not completed it; if this persists, check the network and the devices"
    )
    return Diagnosis("all joined", [], verdict, [f"rank {inside[0]} called {words.call(entry, evidence.dumps[inside[0]])}"])


def _elsewhere(evidence: Evidence) -> Diagnosis | None:
    """Compare the stacks if the records are inconclusive: gloo does not record the sends and receives of pipelines."""
    inside = [rank for rank in evidence.dumps if evidence.blocked(rank)]
    outside = [rank for rank in evidence.dumps if rank not in inside]
    if not inside or not outside or evidence.late:
        return None
    verdict = (
        f"{words.ranks(outside)} {words.verb(outside, 'is', 'are')} outside all collectives{in_step(evidence)}: "
        f"{places(evidence, outside)}; {words.ranks(inside)} {words.verb(inside, 'waits', 'wait')} for other ranks"
    )
    details = [waiting(wait) for wait in evidence.waits]
    details += [f"rank {rank}'s main thread is in {words.main_calls(evidence.dumps[rank])}" for rank in inside]
    return Diagnosis("elsewhere", outside, verdict, details)


def _not_recorded(evidence: Evidence) -> Diagnosis | None:
    """All ranks wait, some of them in operations that are not recorded."""
    if not evidence.waits:
        return None
    waits = "; ".join(waiting(wait) for wait in evidence.waits)
    verdict = f"the records do not show which rank holds up the others{in_step(evidence)}: {waits}"
    details = [
        f"rank {rank}'s main thread is in {words.main_calls(dump)}"
        for rank, dump in evidence.dumps.items()
        if dump.main_stack
    ]
    return Diagnosis("not recorded", [], verdict, details)


def _background(evidence: Evidence) -> Diagnosis | None:
    """Background work, such as writing a checkpoint, may merely be slow."""
    waits = evidence.background_waits
    if not waits:
        return None
    verdict = (
        f"no rank waits for another in training{in_step(evidence)}; in the background, {waiting(waits[0])} "
        f"({waited(evidence, waits[0])} so far)"
    )
    awaited = sorted({rank for wait in waits for rank in wait.behind})
    details = [called(evidence, waits[0])]
    for dump in (evidence.dumps[rank] for rank in awaited):
        threads = [thread for thread in dump.threads if not thread.main]
        details += [f"rank {dump.rank}'s thread {thread.name} is {place(dump.stacks[thread.stack])}" for thread in threads]
    return Diagnosis("background", [], verdict, details)


def _nothing(evidence: Evidence) -> Diagnosis:
    return Diagnosis("nothing", [], f"no rank waits for another{in_step(evidence)}", [])
