"""Traces the kinds of blocks that candidates have, and composes candidates of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from functools import cache, partial
from typing import TYPE_CHECKING

from titan_core.api import Experts, Job, MeshPlan, PipelineCosts, UserError
from titan_core.api.config.sections import TrainingSection
from titan_simulate.costs import costs_of
from titan_simulate.estimate.block_classes import block_classes, enough_blocks
from titan_simulate.estimate.imbalance import busiest
from titan_simulate.hardware.machine import Machine
from titan_simulate.plan.candidates import Candidate, Space
from titan_simulate.plan.compose import (
    ANY,
    Arrangement,
    Composition,
    RankShares,
    Worth,
    compose,
    filled,
    holdings,
    least_gib,
    least_seconds,
    least_step,
)
from titan_simulate.plan.kind_costs import DataParallel, KindCosts
from titan_simulate.plan.kinds import Kind, SmallJob, Taken, small_job
from titan_simulate.plan.meshes import number_of_ranks, ranks_along, shares_parameters, smallest_mesh
from titan_simulate.plan.traced_kind import TracedKind

if TYPE_CHECKING:
    from titan_simulate.estimate.traced_rank import TracedRank

BATCHES = (1, 2)
"""Sequences of the microbatches that are traced."""

Take = Callable[[Sequence[SmallJob], Callable[[], None]], Sequence[Taken]]
"""(small jobs, what to call meanwhile) -> their traces."""


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

    def trace(self, kinds: Mapping[Kind, MeshPlan], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Trace kinds, each of which a job on its mesh has.

        Args:
            meanwhile: called while other processes trace.
        """
        new = [kind for kind in kinds if kind not in self._known]
        blocks = enough_blocks(list(self._classes.values()))
        meshes = {kind: smallest_mesh(kinds[kind]) for kind in new}
        jobs = [(*small_job(meshes[kind], kind, batch), blocks) for kind in new for batch in BATCHES]
        found = self._take(jobs, meanwhile)
        for kind, one, two in zip(new, found[::2], found[1::2], strict=True):
            failed = next((each for each in (one, two) if isinstance(each, UserError | str)), None)
            if failed is not None:
                self._known[kind] = failed
                continue
            self._known[kind] = self._costs(kind, meshes[kind], one, two)

    def _costs(self, kind: Kind, mesh: MeshPlan, one: TracedRank, two: TracedRank) -> KindCosts:
        job = self._job(kind, mesh)
        costs, layout = list(costs_of(self._space.transforms, job)), job.model.layout
        fixed = any(each.exchanged_rows is not None for each in costs)
        traced = TracedKind(
            one=one, two=two, classes=list(self._classes.values()), blocks=layout.blocks, head=layout.head,
            experts=[pattern.rpartition(".")[0] for pattern, rule in layout.rules.items() if isinstance(rule, Experts)],
            data_groups=partial(shares_parameters, mesh), overlaps=any(each.overlaps_matmuls for each in costs),
            ranks=mesh.world_size // number_of_ranks(mesh, mesh.data_dims("replicate")),
            worst=partial(busiest, job=job, imbalance=self._imbalance, fixed=fixed),
        )  # fmt: skip
        return KindCosts(traced, self._machine)

    def _job(self, kind: Kind, mesh: MeshPlan) -> Job:
        values = {dim.degree_key: mesh.degrees[dim.name] for dim in mesh.dims}
        return self._space.assumed({**values, **dict(kind.degrees)}, 1, dict(kind.chosen))

    def composition(self, one: Candidate, kind: Kind | None = None, worth: Worth = ANY) -> Composition:
        """Return the memory and the time of a candidate.

        Args:
            kind: that was traced; default: its own. From another one, its own descends, and what is returned is a guess.
            worth: of which jobs the whole time is worth finding.
        """
        costs, shares = self._costs_of(kind or one.kind), self._shares(one.kind, kind or one.kind)
        return compose(costs, self._held(one.pipeline), self._arrangement(one), shares, worth)

    def seconds(self, kind: Kind, batch: int, one_expert: bool = False) -> float:
        """Return the least time of forward and backward of a sequence, in microbatches of ``batch`` ones, on all blocks of a
        kind that was traced.

        Args:
            one_expert: whether to count experts as one product at full speed.
        """
        return least_seconds(self._costs_of(kind), self._whole, batch, one_expert) / batch

    def filled(self, kind: Kind, proved: bool = True) -> float:
        """Return the activations of a sequence that a rank of a traced kind keeps, by the memory that it has for them.

        Args:
            proved: whether to count what it keeps for backward only.
        """
        return filled(self._costs_of(kind), self._whole, self._space.gpus, self._machine.memory_gib, proved)

    @property
    def _whole(self) -> Counter[int]:
        ((_, blocks),) = self._held(None)
        return blocks

    def least(self, one: Candidate, kind: Kind) -> tuple[float, float]:
        """Return lower bounds of the step of a candidate, in seconds, and of its memory, in GiB.

        Args:
            kind: that was traced, and from which the candidate's descends.
        """
        costs, held, job = self._costs_of(kind), self._held(one.pipeline), self._arrangement(one)
        share = self._shares(one.kind, kind).work
        return least_step(costs, held, job, share), least_gib(costs, held, job, share, self._space.gpus)

    def _shares(self, kind: Kind, ancestor: Kind) -> RankShares:
        work, weights = (
            ancestor.ranks(keys) / kind.ranks(keys) for keys in (self._space.rules.divided, self._space.rules.weights)
        )
        return RankShares(work, weights)

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
            scale = Fraction(*(number_of_ranks(one, mesh.data_dims("shard")) for one in (mesh, small)))
            self._data[key] = DataParallel(scale, ranks_along(mesh, mesh.data_dims("replicate")))
        data = self._data[key]
        batch, number = one.local_batch, one.microbatches
        if one.pipeline is not None:
            batch, number = one.pipeline.microbatch_size, one.pipeline.microbatches
        return Arrangement(batch, number, data, one.parameters_stay, one.gradients_stay, self._width, one.pipeline)


def _bytes(dtype: str) -> int:
    return 2 if "16" in dtype else 4
