"""The jobs that a plan compares: degrees from the mesh, other keys from what transforms declare. Free of torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from types import MappingProxyType
from typing import Any

from titan_core.api import Job, MeshPlan, Phase, PipelineCosts, Problem, Transform
from titan_core.api.config.resolved import Override
from titan_core.api.config.sections import TrainingSection
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_simulate.costs import costs_of
from titan_simulate.plan.kinds import GLOBAL_BATCH, LOCAL_BATCH, Kind, Rules, text_of
from titan_simulate.plan.meshes import is_sharded

LARGEST_LOCAL_BATCH = 64
ARRANGING = (Phase.PIPELINE, Phase.DATA)
"""Phases of transforms whose choices arrange blocks and their batch, and leave the blocks' own operators as they are."""
_NONE = object()
JobOf = Callable[[Sequence[Override]], AssembledJob]
"""Returns the recipe's job on the plan's number of ranks, with further overrides."""


@dataclass(frozen=True)
class Candidate:
    """One way to run the recipe."""

    values: Mapping[str, Any]
    """Config key -> value: all keys that the plan decides."""
    mesh: MeshPlan
    local_batch: int
    microbatches: int
    """Of the data loader: a pipeline divides a local batch further."""
    kind: Kind
    pipeline: PipelineCosts | None = None
    parameters_stay: bool = False
    gradients_stay: bool = False
    matmul_types: tuple[str, ...] = ()
    """Types in which blocks multiply, beside those of their parameters."""
    given: bool = False
    """Whether it is the recipe as it is."""

    @property
    def choices(self) -> tuple[object, ...]:
        """What decides how far its composition is wrong: the modes and the schedule that it chooses, and whether data
        parallelism shards and the layers are divided."""
        chosen = (item for item in self.values.items() if isinstance(item[1], str | bool))
        return (self.kind.sharded, self.pipeline is None, *sorted(chosen))

    @property
    def overrides(self) -> list[Override]:
        """The values as overrides."""
        return [Override(key, text_of(value)) for key, value in self.values.items()]


@dataclass(frozen=True)
class Refused:
    """A combination that a check rejects."""

    mesh: str
    key: str
    """The key whose value is impossible."""
    why: str


class Space:
    """All combinations of degrees and choices."""

    def __init__(
        self, job: AssembledJob, gpus: int, global_batch: int, fixed: Collection[str], changes_numbers: bool
    ) -> None:
        """
        Args:
            job: any valid job of the recipe.
            fixed: keys that keep the recipe's values.
            changes_numbers: whether to vary keys that change what a run computes, such as its precision.
        """
        self.job, self.registry = job, job.registry
        self.gpus, self.global_batch, self.fixed, self.changes_numbers = gpus, global_batch, fixed, changes_numbers
        self._searched: dict[str, bool] = {}
        self.transforms = job.registry.all(Transform)
        """All that are installed: those that are inactive in ``job`` may be active in another."""
        varied = sorted((one for one in self.transforms if one.planning.choices is not None), key=lambda one: -one.phase)
        self._of_blocks = [one for one in varied if one.phase not in ARRANGING]
        self._arranging = [one for one in varied if one.phase in ARRANGING]

    def searched(self, key: str) -> bool:
        """Whether the plan decides ``key``: the user did not set it, and it changes only where and how fast a job computes
        (or the user allows more)."""
        if key not in self._searched:
            section, _, name = key.partition(".")
            mine = [cls for cls in self.job.config.sections if cls.section == section and name in cls.model_fields]
            self._searched[key] = key not in self.fixed and (
                self.changes_numbers
                or key in self.job.mesh.degree_keys
                or any(fnmatchcase(name, pattern) for cls in mine for pattern in cls.may_change)
            )
        return self._searched[key]

    def meshes(self, num_experts: Sequence[int]) -> Iterator[dict[str, int]]:
        """Yield degrees by config key, of dimensions and views, that multiply to the number of GPUs."""
        mesh = self.job.mesh
        # A dimension whose replicas diverge trains other weights, so its degree stays.
        searched = [dim for dim in mesh.dims if not dim.diverges and self.searched(dim.degree_key)]
        kept = {dim.degree_key: mesh.degrees[dim.name] for dim in mesh.dims if dim not in searched}
        rest = self.gpus
        for degree in kept.values():
            if rest % degree:
                return
            rest //= degree
        most = {
            "layers": self.job.model.layout.num_blocks,
            "batch": self.global_batch,
            "sequence": self.job.batch.seq_len,
        }
        limits = [most.get(dim.divides, self.job.model.layout.dim) for dim in searched]
        views = [view for view in mesh.views if self.searched(view.degree_key)]
        for degrees in factorisations(rest, len(searched)):
            if any(degree > limit for degree, limit in zip(degrees, limits, strict=True)):
                continue
            found = {**kept, **{dim.degree_key: degree for dim, degree in zip(searched, degrees, strict=True)}}
            by_name = {dim.name: found[dim.degree_key] for dim in mesh.dims}
            options = []
            for view in views:
                borrowed = MeshPlan(mesh.dims, by_name).borrowed(view)
                options.append([
                    degree for degree in divisors(borrowed)
                    if degree == 1 or not view.shards_parameters
                    or (num_experts and all(number % degree == 0 for number in num_experts))
                ])  # fmt: skip
            for chosen in itertools.product(*options):
                yield found | {view.degree_key: degree for view, degree in zip(views, chosen, strict=True)}

    def local_batches(self, degrees: Mapping[str, int]) -> list[int]:
        """Return the local batch sizes worth trying, largest first: divisors of the sequences of a rank. A pipeline runs all
        sequences of a step at once, so its local batch is all of them."""
        mesh = self.job.mesh
        ranks = 1
        for dim in mesh.dims:
            ranks *= degrees[dim.degree_key] if dim.divides == "batch" else 1
        if LOCAL_BATCH in self.fixed or self.global_batch % ranks:
            return [self.job.section(TrainingSection).local_batch_size]
        sequences = self.global_batch // ranks
        if any(degrees[dim.degree_key] > 1 for dim in mesh.dims if dim.divides == "layers"):
            return [sequences]
        return [size for size in reversed(divisors(sequences)) if size <= LARGEST_LOCAL_BATCH]

    def mesh(self, degrees: Mapping[str, int]) -> MeshPlan:
        """Return the mesh with these degrees by config key."""
        known = self.job.mesh
        return MeshPlan(
            known.dims,
            {dim.name: degrees[dim.degree_key] for dim in known.dims},
            known.views,
            {view.name: degrees.get(view.degree_key, known.view_degrees[view.name]) for view in known.views},
        )

    def assumed(self, degrees: Mapping[str, int], local: int, chosen: Mapping[str, Any] = MappingProxyType({})) -> Job:
        """Return the job on this mesh and local batch, as assembly would see it if it is valid."""
        config = self.job.config.changed({**degrees, GLOBAL_BATCH: self.global_batch, LOCAL_BATCH: local, **chosen})
        mesh = self.mesh(degrees)
        ranks = mesh.batch_degree
        batch = replace(
            self.job.batch, global_size=self.global_batch, local_size=local, ranks=ranks,
            microbatches=max(1, self.global_batch // (local * ranks)),
        )  # fmt: skip
        return replace(self.job, config=config, mesh=mesh, batch=batch, fixes=False)

    def variants(
        self, job: Job, values: Mapping[str, Any], kind: Kind | None = None
    ) -> Iterator[Candidate | Refused]:  # fmt: skip
        """Yield the candidates on one mesh and batch: all combinations of the choices of transforms that their checks
        accept.

        Args:
            kind: of their blocks; default: all.
        """
        for each, of_kind in self._settings(self._of_blocks, job, None if kind is None else dict(kind.chosen)):
            for whole, more in self._settings(self._arranging, each):
                problem = next(self._problems([*self._of_blocks, *self._arranging], whole), None)
                chosen = {**of_kind, **more}
                if problem is None:
                    yield self.candidate(whole, {**values, **chosen}, of_kind)
                elif (refused := refusal(problem, str(whole.mesh))).key not in chosen:  # else two choices exclude each other
                    yield refused

    def _settings(
        self, transforms: Sequence[Transform], job: Job, only: Mapping[str, Any] | None = None
    ) -> Iterator[tuple[Job, dict[str, Any]]]:
        """Yield all combinations of what ``transforms`` offer, or that of ``only`` if it is one. Each sees the choices of
        those before it."""
        if not transforms:
            yield job, {}
            return
        transform, *others = transforms
        assert transform.planning.choices is not None
        offered: Mapping[str, Sequence[Any]] = transform.planning.choices.call(Mapping, transform.context(job))
        choices = {key: options for key, options in offered.items() if self.searched(key)}
        if only is not None:
            choices = {key: [one for one in options if only.get(key, _NONE) == one] for key, options in choices.items()}
        for chosen in itertools.product(*choices.values()):
            values = dict(zip(choices, chosen, strict=True))
            changed = replace(job, config=job.config.changed(values)) if values else job
            for each, more in self._settings(others, changed, only):
                yield each, {**values, **more}

    def _problems(self, transforms: Sequence[Transform], job: Job) -> Iterator[Problem]:
        for transform in transforms:
            context = transform.context(job)
            if transform.check is not None and transform.active(context):
                yield from transform.check.call_list(Problem, context)

    def candidate(self, job: Job, values: Mapping[str, Any], of_kind: Mapping[str, Any], given: bool = False) -> Candidate:
        """Return ``job`` as a candidate.

        Args:
            of_kind: of ``values``, those that decide the operators of a block.
        """
        costs = list(costs_of(self.transforms, job))
        pipeline = next((one.pipeline for one in costs if one.pipeline is not None), None)
        batch = job.batch
        return Candidate(
            values, job.mesh, batch.local_size, batch.microbatches, self.kind(job.mesh, of_kind), pipeline,
            parameters_stay=any(one.parameters_stay for one in costs),
            gradients_stay=any(one.gradients_stay for one in costs),
            matmul_types=tuple(one.matmul_type for one in costs if one.matmul_type is not None), given=given,
        )  # fmt: skip

    def kinds(self, mesh: MeshPlan) -> Iterator[Kind]:
        """Yield the kinds of blocks that jobs on ``mesh`` may have."""
        degrees = {dim.degree_key: mesh.degrees[dim.name] for dim in mesh.dims}
        degrees |= {view.degree_key: mesh.view_degrees[view.name] for view in mesh.views}
        for each, of_kind in self._settings(self._of_blocks, self.assumed(degrees, 1)):
            yield self.kind(each.mesh, of_kind)

    @cached_property
    def rules(self) -> Rules:
        """How the kinds are related."""
        mesh = self.job.mesh
        divided = {dim.degree_key for dim in mesh.dims if dim.divides in ("weights", "sequence")}
        experts = {view.degree_key for view in mesh.views if view.shards_parameters}
        ordered = {key: values for one in self.transforms for key, values in one.planning.faster_first.items()}
        weights = {dim.degree_key for dim in mesh.dims if dim.divides == "weights"}
        return Rules(divided, weights, {view.degree_key for view in mesh.views} - experts, experts, ordered)

    def kind_of(self, job: Job) -> dict[str, Any]:
        """Return the values of ``job`` that decide about the kind of its blocks."""
        offered: dict[str, Any] = {}
        for transform in self._of_blocks:
            assert transform.planning.choices is not None
            keys: Mapping[str, Sequence[Any]] = transform.planning.choices.call(Mapping, transform.context(job))
            offered |= {key: job.config.value(key) for key in keys if self.searched(key)}
        return offered

    def kind(self, mesh: MeshPlan, chosen: Mapping[str, Any]) -> Kind:
        """Return the kind of the blocks of a job."""
        degrees = {
            dim.degree_key: mesh.degrees[dim.name]
            for dim in mesh.dims
            if dim.divides not in ("layers", "batch") or dim.data_parallel == "own" or dim.diverges
        }
        degrees |= {view.degree_key: mesh.view_degrees[view.name] for view in mesh.views}
        return Kind(tuple(degrees.items()), tuple(sorted(chosen.items(), key=str)), is_sharded(mesh))


def refusal(problem: Problem, mesh: str) -> Refused:
    """Return ``problem``, which a job on ``mesh`` has."""
    key = problem.where.partition(" = ")[0].rpartition(": ")[2]
    return Refused(mesh, key, problem.why)


def factorisations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield all tuples of ``count`` factors whose product is ``number``."""
    if count == 0:
        if number == 1:
            yield ()
        return
    if count == 1:
        yield (number,)
        return
    for first in divisors(number):
        for rest in factorisations(number // first, count - 1):
            yield (first, *rest)


def divisors(number: int) -> list[int]:
    """Return the divisors of ``number``, in order."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return small + [number // divisor for divisor in reversed(small) if divisor * divisor != number]
