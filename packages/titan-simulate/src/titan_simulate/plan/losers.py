"""Why candidates lost: those that were not estimated, in groups, and combinations that a check rejects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from titan_simulate.plan.candidates import Candidate, Refused
from titan_simulate.plan.compose import GIB, Composition
from titan_simulate.plan.result import Loser, Plan, describe, reason, speed

SIMULATION = "its simulation failed"
"""In place of the key of :class:`Refused`, for a candidate whose estimate raised another error than a UserError."""
_TOO_LARGE = "does not fit"


@dataclass(frozen=True)
class Known:
    """A candidate that was composed."""

    candidate: Candidate
    composed: Composition
    seconds: float
    """As estimates of the like correct it."""
    gib: float
    """The same of its memory."""
    estimated: bool


def nearest(plan: Plan, known: Iterable[Known], limit: float) -> tuple[Candidate, float] | None:
    """Return the candidate that needs least memory if nothing fits, and how much. ``None`` if those that fit cannot be
    estimated, or were refused.

    Args:
        limit: memory of a device, in GiB.
    """
    if plan.too_large:
        smallest = plan.too_large[0]
        return smallest.candidate, smallest.figures.peak_gib
    found = min(known, key=lambda one: one.gib, default=None)
    return None if found is None or found.gib <= limit else (found.candidate, found.gib)


def losers(plan: Plan, known: Iterable[Known], refused: Sequence[Refused], limit: float) -> list[Loser]:
    """Return why candidates lost.

    Args:
        refused: combinations that a check rejects.
        limit: memory of a device, in GiB.
    """
    others = (one for one in known if not one.estimated)
    return [*_estimated(plan, limit), *_composed(plan, others, limit), *_refused(refused)]


def _estimated(plan: Plan, limit: float) -> Iterator[Loser]:
    for one in plan.too_large:
        over = one.figures.peak_gib - limit
        detail = f"needs {one.figures.peak_gib:.1f} GiB, {over:.1f} too many (estimated)"
        yield Loser(_TOO_LARGE, 1, describe(one.candidate), detail)


def _composed(plan: Plan, others: Iterable[Known], limit: float) -> Iterator[Loser]:
    best = plan.best[0] if plan.best else None
    groups: dict[str, list[Known]] = defaultdict(list)
    for one in others:
        if one.gib > limit:
            groups[_TOO_LARGE].append(one)
        elif best is not None:
            groups[reason(one.composed, best.composed)].append(one)
    for why, members in sorted(groups.items(), key=lambda item: -len(item[1])):
        if why == _TOO_LARGE:
            shown = min(members, key=lambda one: one.gib)
            kind = max(shown.composed.memory, key=lambda name: shown.composed.memory[name])
            detail = f"needs about {shown.gib:.1f} GiB, {shown.composed.memory[kind] / GIB:.1f} of them {kind}"
        else:
            shown = min(members, key=lambda one: one.seconds)
            assert best is not None
            detail = speed(best.figures.step_seconds / shown.seconds)
        yield Loser(why, len(members), describe(shown.candidate), detail)


def _refused(refused: Sequence[Refused]) -> Iterator[Loser]:
    groups: dict[str, list[Refused]] = defaultdict(list)
    for one in refused:
        groups[one.key].append(one)
    for key, members in sorted(groups.items(), key=lambda item: -len(item[1])):
        yield Loser(key if key == SIMULATION else f"refused: {key}", len(members), members[0].mesh, members[0].why)
