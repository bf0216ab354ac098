"""Sums the statistics of modules over all ranks, once a step."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor

from titan_core.api import ModelPart, UserError, World
from titan_core.api.parallel.microbatch import StepCounts


class StatisticSums:
    """Sums the statistics of a step by one collective, if the model has any (:func:`~titan_core.api.add_statistic`)."""

    def __init__(self, world: World, parts: Iterable[ModelPart]) -> None:
        """
        Raises:
            UserError: parts of the model declare one statistic with different shapes. Raised on every rank.
        """
        self._world, self._shapes = world, dict[str, tuple[int, ...]]()
        declared = {item for rank in world.gather([part.statistics for part in parts]) for of in rank for item in of.items()}
        for name, shape in sorted(declared):
            if name in self._shapes:
                why = f"is declared with the shapes {list(self._shapes[name])} and {list(shape)}"
                raise UserError.one(f"statistic {name!r}", why, "declare it equally for all parts of the model")
            self._shapes[name] = shape
        plan = world.plan
        self._ranks = math.prod(plan.degrees[dim.name] for dim in plan.dims if dim.divides == "weights")
        self._first = world.is_first_along("weights")

    def begin(self) -> StepCounts:
        """Return what collects the statistics of a step on this rank."""
        return StepCounts(self._shapes, self._world.device, self._ranks, self._first)

    def __call__(self, counted: StepCounts) -> dict[str, Tensor]:
        """Return the statistics of a step, the same on all ranks. All ranks must call this."""
        if counted.values:
            self._world.sum(counted.counts)
        return counted.values
