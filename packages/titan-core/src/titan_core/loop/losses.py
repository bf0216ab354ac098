"""Losses, metrics and statistics of a step, summed over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_core.api import ModelPart, UserError, World
from titan_core.api.parallel.microbatch import AuxiliaryLosses, MetricSums, StepCounts
from titan_core.loop.lookahead import StepTotals


@dataclass(frozen=True)
class Losses:
    """Losses of a step on the device, the same on all ranks."""

    mean: Tensor
    """Mean loss of the global batch, a scalar."""
    of_ranks: Tensor
    """Mean loss of each data-parallel rank's part of the batch, ``[data ranks]``."""
    auxiliary: dict[str, Tensor]
    """Auxiliary losses by name, scalars."""


class MetricMeans:
    """The objective's metrics, summed over all ranks by one collective, if it has any."""

    def __init__(self, world: World, parts: Iterable[ModelPart]) -> None:
        self._world, self._counts = world, world.is_first_along("weights")  # the other ranks compute the same metrics
        of_ranks = world.gather([part.metrics for part in parts])
        self._names = sorted({name for rank in of_ranks for names in rank for name in names})

    def __call__(self, metrics: MetricSums) -> dict[str, Tensor]:
        """Return the mean of each metric, an fp64 scalar on the device. All ranks must call this."""
        if unknown := metrics.values.keys() - self._names:
            raise RuntimeError(f"the objective reports metric {min(unknown)!r}, which its `metrics` do not name")
        if not self._names:
            return {}
        sums = torch.zeros(len(self._names), 2, dtype=torch.float64, device=self._world.device)
        for name, value in metrics.values.items() if self._counts else ():
            sums[self._names.index(name)] = value
        self._world.sum(sums)
        return dict(zip(self._names, sums[:, 0] / sums[:, 1], strict=True))


class LossSums:
    """Sums the losses of a step by one collective."""

    def __init__(self, world: World, parts: Iterable[ModelPart]) -> None:
        self._world, self._data_rank = world, world.data_rank
        self._first = world.is_first_along("weights")  # the other ranks compute the same losses
        of_ranks = world.gather([part.auxiliary_losses for part in parts])
        self._names = sorted({name for rank in of_ranks for names in rank for name in names})

    def __call__(self, share: Tensor, auxiliary: AuxiliaryLosses, totals: StepTotals, target_weight: float) -> Losses:
        """Return the losses of a step. All ranks must call this.

        Args:
            share: this rank's share of the loss (:class:`~titan_core.api.StepRunner`).
            auxiliary: the auxiliary losses of this rank's modules.
            target_weight: total weight of the targets in this rank's part of the batch.
        """
        world, ranks = self._world, self._world.data_ranks
        losses = torch.zeros(1 + ranks + len(self._names), device=world.device)
        if self._first:
            losses[0] = share * (totals.replica_weight / totals.weight)
            losses[1 + self._data_rank] = share * (totals.replica_weight / (target_weight or 1.0))
        for name, value in auxiliary.values.items():
            if name not in self._names:
                raise RuntimeError(f"a module adds auxiliary loss {name!r}, which no part of the model declares")
            if self._first or name in auxiliary.divided:
                losses[1 + ranks + self._names.index(name)] = value / world.plan.diverging_replicas
        world.sum(losses)
        return Losses(losses[0], losses[1 : 1 + ranks], dict(zip(self._names, losses[1 + ranks :], strict=True)))


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
