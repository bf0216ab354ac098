"""Traces the kinds of blocks that candidates have, and composes candidates of them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cache, partial
from typing import TYPE_CHECKING

from titan_core.api import Job, MeshPlan, PipelineCosts, UserError
from titan_core.api.config.sections import TrainingSection
from titan_simulate.costs import costs_of
from titan_simulate.estimate.block_classes import block_classes, enough_blocks
from titan_simulate.estimate.imbalance import busiest
from titan_simulate.hardware.machine import Machine
from titan_simulate.plan.candidates import Candidate, Space
from titan_simulate.plan.compose import Arrangement, Composition, compose, holdings, least_gib, least_seconds, least_step
from titan_simulate.plan.kind_costs import DataParallel, KindCosts
from titan_simulate.plan.kinds import Kind, SmallJob, Taken, small_job, smallest_mesh

if TYPE_CHECKING:
    from titan_simulate.estimate.traced_rank import TracedRank

BATCHES = (1, 2)
"""Sequences of the microbatches that are traced."""


Take = Callable[[Sequence[SmallJob]], Sequence[Taken]]


class Composer:
    """Composes candidates of a space on a machine."""

    def __init__(
        self, space: Space, machine: Machine, take: Take, frozen: Collection[str] = (), imbalance: float = 1.0
    ) -> None:  # fmt: skip
        """
        Args:
            take: traces small jobs.
            frozen: names of frozen parameters.
            imbalance: rows that the experts of the busiest rank compute, by the mean of the ranks that divide them.
        """
        self._space, self._machine, self._take = space, machine, take
        self._classes = block_classes(space.job.model.layout, frozen)
        self._imbalance = imbalance
        self._data: dict[tuple[int, ...], DataParallel] = {}
        self._known: dict[Kind, KindCosts | UserError | str] = {}
        self._held = cache(self._holdings)
        training = space.job.section(TrainingSection)
        self._width = _bytes(training.mixed_precision_param) / _bytes(training.mixed_precision_reduce)

    def failure(self, kind: Kind) -> UserError | str | None:
        """Return why a kind that was traced has no costs, if so."""
        found = self._known[kind]
        return None if isinstance(found, KindCosts) else found

    def trace(self, kinds: Mapping[Kind, MeshPlan]) -> None:
        """Trace kinds, each of which a job on its mesh has."""
        new = [kind for kind in kinds if kind not in self._known]
        blocks = enough_blocks(list(self._classes.values()))
        meshes = {kind: smallest_mesh(kinds[kind]) for kind in new}
        found = self._take([(*small_job(meshes[kind], kind, batch), blocks) for kind in new for batch in BATCHES])
        for kind, one, two in zip(new, found[::2], found[1::2], strict=True):
            failed = next((each for each in (one, two) if isinstance(each, UserError | str)), None)
            if failed is not None:
                self._known[kind] = failed
                continue
            self._known[kind] = self._costs(kind, meshes[kind], one, two)

    def _costs(self, kind: Kind, mesh: MeshPlan, one: TracedRank, two: TracedRank) -> KindCosts:
        job = self._job(kind, mesh)
        costs = list(costs_of(self._space.transforms, job))
        fixed = any(each.exchanged_rows is not None for each in costs)
        return KindCosts(
            one, two, self._machine, list(self._classes.values()), job.model.layout.head, partial(_sees_other_data, mesh),
            any(each.overlaps_matmuls for each in costs), mesh.world_size // _ranks(mesh, mesh.data_dims("replicate")),
            partial(busiest, job=job, imbalance=self._imbalance, fixed=fixed),
        )  # fmt: skip

    def _job(self, kind: Kind, mesh: MeshPlan) -> Job:
        values = {dim.degree_key: mesh.degrees[dim.name] for dim in mesh.dims}
        return self._space.assumed({**values, **dict(kind.degrees)}, 1, dict(kind.chosen))

    def composition(self, one: Candidate) -> Composition:
        """Return the memory and the time of a candidate whose kind was traced."""
        return compose(self._costs_of(one.kind), self._held(one.pipeline), self._arrangement(one), self._machine)

    def seconds_of_sequence(self, kind: Kind, batch: int) -> float:
        """Return the least time of forward and backward of a sequence, in microbatches of ``batch`` ones, on all blocks of a
        kind that was traced."""
        ((_, blocks),) = self._held(None)
        return least_seconds(self._costs_of(kind), blocks, batch) / batch

    def least(self, one: Candidate, kind: Kind, share: float) -> tuple[float, float]:
        """Return lower bounds of the step of a candidate, in seconds, and of its memory, in GiB.

        Args:
            kind: that was traced, and from which the candidate's descends.
            share: ranks that divide a block of ``kind``, by those that divide one of the candidate.
        """
        costs, held, job = self._costs_of(kind), self._held(one.pipeline), self._arrangement(one)
        return least_step(costs, held, job, share), least_gib(costs, held, job, share, self._space.gpus)

    def _costs_of(self, kind: Kind) -> KindCosts:
        costs = self._known[kind]
        assert isinstance(costs, KindCosts)
        return costs

    def _holdings(self, pipeline: PipelineCosts | None) -> list[tuple[int, Counter[int]]]:
        return holdings(self._classes, pipeline)

    def _arrangement(self, one: Candidate) -> Arrangement:
        mesh = one.mesh
        key = (*mesh.degrees.values(), *mesh.view_degrees.values())
        if key not in self._data:
            small = smallest_mesh(mesh)
            scale = Fraction(_ranks(mesh, mesh.data_dims("shard")), _ranks(small, mesh.data_dims("shard")))
            self._data[key] = DataParallel(scale, ranks_along(mesh, mesh.data_dims("replicate")))
        data = self._data[key]
        batch, number = one.local_batch, one.microbatches
        if one.pipeline is not None:
            batch, number = one.pipeline.microbatch_size, one.pipeline.microbatches
        return Arrangement(batch, number, data, one.parameters_stay, one.gradients_stay, self._width, one.pipeline)


def _bytes(dtype: str) -> int:
    return 2 if "16" in dtype else 4


def _ranks(mesh: MeshPlan, names: Iterable[str]) -> int:
    return math.prod(mesh.degrees[name] for name in names)


def _sees_other_data(mesh: MeshPlan, ranks: Sequence[int]) -> bool:
    """Whether ``ranks`` differ along dimensions only whose ranks see different data."""
    other = [dim for dim in mesh.dims if not dim.sees_different_data]
    return len({tuple(coordinates(mesh, rank)[dim.name] for dim in other) for rank in ranks}) == 1


def coordinates(mesh: MeshPlan, rank: int) -> dict[str, int]:
    """Return the place of a rank along each dimension."""
    found = {}
    for dim in reversed(mesh.dims):
        rank, found[dim.name] = divmod(rank, mesh.degrees[dim.name])
    return found


def ranks_along(mesh: MeshPlan, names: Collection[str]) -> tuple[int, ...]:
    """Return the ranks that differ from rank 0 along the dimensions ``names`` only."""
    strides, inside = {}, 1
    for dim in reversed(mesh.dims):
        strides[dim.name] = inside
        inside *= mesh.degrees[dim.name]
    places = [range(mesh.degrees[dim.name]) if dim.name in names else range(1) for dim in mesh.dims]
    steps = [strides[dim.name] for dim in mesh.dims]
    return tuple(sum(a * b for a, b in zip(place, steps, strict=True)) for place in itertools.product(*places))
