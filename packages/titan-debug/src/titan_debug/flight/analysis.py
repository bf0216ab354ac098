"""The verdict over all ranks' dumps: which rank holds up the others, and why. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from shlex import quote
from typing import Any

from titan_core.api import UserError
from titan_debug.flight.diagnose import Kind, diagnose
from titan_debug.flight.evidence import Evidence, waiting_for
from titan_debug.flight.read import Dumps, dump_folder, read_dumps
from titan_debug.flight.stacks import place

MOST_ANALYSED = 256
"""Largest job in which a rank analyses all dumps while the job is still running."""


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


def verdict_on(run: str, since: float) -> str | None:
    """Return a one-line verdict on the attempt at ``run`` that began at ``since`` (seconds since the epoch), with the
    command that prints the whole analysis. Return ``None`` if that attempt left no dumps."""
    command = f"see `titan flight analyse {quote(str(run))}`"
    try:
        dumps = read_dumps(dump_folder(run))
    except UserError:  # no dumps
        return None
    if dumps.dumps[0].attempt < since:
        return None
    return command if dumps.world_size > MOST_ANALYSED else f"{analyse(dumps).verdict}; {command}"


def _state(evidence: Evidence, rank: int) -> RankState:
    dump = evidence.dumps.get(rank)
    if dump is None:
        return RankState(rank, None, "left no dump")
    in_background = [wait for wait in evidence.background_waits if wait.rank == rank]
    states = []
    if dump.failure is not None:
        because = " because another rank was gone or late" if dump.failure.follows else ""
        states.append(f"raised {dump.failure.type}{because}")
    if dump.died:
        states.append(f"died ({dump.died})")
    states += [waiting_for(wait) for wait in [*evidence.waits_of(rank), *in_background]]
    states.append(f"main thread {place(dump.main_stack)}")
    return RankState(rank, dump.step if dump.step_known else None, "; ".join(states), dump.host, dump.why)
