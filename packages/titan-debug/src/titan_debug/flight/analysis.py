"""Which rank holds the others up, and why: a verdict over the dumps of all ranks. Free of torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from titan_core.api.errors import UserError
from titan_debug.flight.diagnose import Kind, diagnose
from titan_debug.flight.evidence import Evidence, waiting
from titan_debug.flight.read import Dumps, dump_folder, read_dumps
from titan_debug.flight.stacks import place

MOST_ANALYSED = 256
"""Ranks up to which a rank reads the dumps of all while the job still runs."""


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
    """The ranks that the others' trouble comes from; none where that is unknown."""
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


def analyse(dumps: Dumps) -> Analysis:
    """The verdict: of several findings the one that explains the others."""
    evidence = Evidence.of(dumps)
    first, *rest = diagnose(evidence)
    also = [f"also: {one.verdict}" for one in rest if not one.culprits or not set(one.culprits) <= set(first.culprits)]
    states = [_state(evidence, rank) for rank in range(dumps.world_size)]
    return Analysis(first.kind, first.verdict, first.culprits, evidence.step, [*first.details, *also], states, dumps.notes)


def verdict_on(run: str, since: float) -> str | None:
    """The verdict on the attempt at ``run`` that began at ``since`` (seconds since the epoch), in one line, with the command
    that prints the whole analysis. ``None`` if that attempt left no dumps."""
    command = f"see `titan flight analyse {run}`"
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
    beside = [wait for wait in evidence.background_waits if wait.rank == rank]
    states = []
    if dump.failure is not None:
        states.append(f"raised {dump.failure.type}{', as another rank was gone or late' if dump.failure.follows else ''}")
    if dump.died:
        states.append(f"died ({dump.died})")
    states += [waiting(wait).partition(" ")[2].partition(" ")[2] for wait in [*evidence.waits_of(rank), *beside]]
    states.append(f"main thread {place(dump.main_stack)}")
    return RankState(rank, dump.step if dump.step_known else None, "; ".join(states), dump.host, dump.why)
