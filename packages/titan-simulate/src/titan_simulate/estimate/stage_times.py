"""The time of each stage of a pipeline, from those of the simulated ranks. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from titan_simulate.estimate.figures import ACTIONS, ALL, BLOCKS

Stage = Mapping[str, Mapping[str, float]]
"""Seconds of an action, as in :attr:`~titan_simulate.estimate.figures.Figures.stages`."""


def stage_times(known: Mapping[int, Stage], weights: Sequence[float]) -> dict[str, list[float]]:
    """Return kind of action -> seconds by stage.

    Stages that are not simulated have neither an embedding nor a head, so they take the time of their blocks, at that of
    a block in simulated stages: those in the middle if there are any, which are like them.

    Args:
        known: simulated stages, by number.
        weights: of the blocks of each stage, in blocks of mean cost.
    """
    last = len(weights) - 1
    times: dict[str, list[float]] = {}
    for kind in ACTIONS:
        ran = [stage for stage in known if known[stage][ALL][kind]]
        # The first stage needs no gradients of its inputs: where they are computed by themselves, it is like no other.
        unlike = {"F": (), "B": ()}.get(kind, (0,))
        like = [one for one in ran if 0 < one < last] or [one for one in ran if one not in unlike] or ran
        total = sum(weights[stage] for stage in like)
        block = sum(known[stage][BLOCKS][kind] for stage in like) / total if total else 0.0
        times[kind] = [known[stage][ALL][kind] if stage in known else block * weights[stage] for stage in range(last + 1)]
    return times
