"""The jobs that a plan compares: degrees from the mesh, other keys from what transforms declare. Free of torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from titan_core.api import Job, MeshPlan, Problem, Transform
from titan_core.api.config.resolved import Override
from titan_core.api.config.sections import TrainingSection
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.text import show
from titan_simulate.costs import ADAMW, costs_of, costs_of_optimizer
from titan_simulate.plan.workload import Workload

LOCAL_BATCH = "training.local_batch_size"
GLOBAL_BATCH = "training.global_batch_size"
LARGEST_LOCAL_BATCH = 64
LARGE_EXAMPLE = 8
"""Sequences of a large microbatch in :meth:`Space.examples`."""
JobOf = Callable[[Sequence[Override]], AssembledJob]
"""Returns the recipe's job on the plan's number of ranks, with further overrides."""


@dataclass(frozen=True)
class Candidate:
    """One way to run the recipe."""

    values: Mapping[str, Any]
    """Config key -> value: all keys that the plan decides."""
    workload: Workload
    given: bool = False
    """Whether it is the recipe as it is."""

    @property
    def overrides(self) -> list[Override]:
        """The values as overrides."""
        return [Override(key, _text(value)) for key, value in self.values.items()]

    @property
    def kind(self) -> tuple[object, ...]:
        """What decides how far its guessed activations are wrong: what it recomputes, and the modes and the schedule that it
        chooses."""
        chosen = (item for item in self.values.items() if isinstance(item[1], str | bool))
        return (self.workload.kept, *sorted(chosen))


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
        self.transforms = job.registry.all(Transform)
        """All that are installed: those that are inactive in ``job`` may be active in another."""
        self._own: Workload | None = None

    def searched(self, key: str) -> bool:
        """Whether the plan decides ``key``: the user did not set it, and it changes only where and how fast a job computes
        (or the user allows more)."""
        if key in self.fixed:
            return False
        return (
            self.changes_numbers
            or key in self.job.mesh.degree_keys
            or any(
                fnmatchcase(key.partition(".")[2], pattern)
                for cls in self.job.config.sections
                if cls.section == key.partition(".")[0] and key.partition(".")[2] in cls.model_fields
                for pattern in cls.may_change
            )
        )

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

    def examples(self, degrees: Mapping[str, int]) -> list[Workload]:
        """Return what stands for all candidates on a mesh: small microbatches, without recomputation and with it, and larger
        ones."""
        mesh = self._mesh(degrees)
        sequences = max(1, self.global_batch // mesh.batch_degree)
        self._own = self._own or self.workload(self.job)
        plain = replace(
            self._own, mesh=mesh, kept=1.0, recomputed=0.0, gradients_stay=False, exchanged_rows=None, pipeline=None
        )
        sizes = (1, 0.0), (1, 1.0), (min(LARGE_EXAMPLE, sequences), 1.0)
        return [
            replace(plain, local_batch=size, microbatches=sequences // size, kept=1.0 - again, recomputed=again)
            for size, again in sizes
        ]

    def _mesh(self, degrees: Mapping[str, int]) -> MeshPlan:
        known = self.job.mesh
        return MeshPlan(
            known.dims,
            {dim.name: degrees[dim.degree_key] for dim in known.dims},
            known.views,
            {view.name: degrees.get(view.degree_key, known.view_degrees[view.name]) for view in known.views},
        )

    def assumed(self, degrees: Mapping[str, int], local: int) -> Job:
        """Return the job on this mesh and local batch, as assembly would see it if it is valid."""
        config = self.job.config.changed({**degrees, GLOBAL_BATCH: self.global_batch, LOCAL_BATCH: local})
        mesh = self._mesh(degrees)
        ranks = mesh.batch_degree
        batch = replace(
            self.job.batch, global_size=self.global_batch, local_size=local, ranks=ranks,
            microbatches=max(1, self.global_batch // (local * ranks)),
        )  # fmt: skip
        return replace(self.job, config=config, mesh=mesh, batch=batch, fixes=False)

    def variants(self, job: Job, values: Mapping[str, Any]) -> Iterator[Candidate | Refused]:
        """Yield the candidates on one mesh and batch: all combinations of the choices of transforms that their checks
        accept."""
        varied = [transform for transform in self.transforms if transform.planning.choices is not None]
        latest_first = sorted(varied, key=lambda transform: -transform.phase)
        for each, more in self._settings(latest_first, job):
            problem = next(self._problems(varied, each), None)
            if problem is None:
                yield Candidate({**values, **more}, self.workload(each))
            elif (refused := refusal(problem, str(each.mesh))).key not in more:  # else two choices exclude each other
                yield refused

    def _settings(
        self, transforms: Sequence[Transform], job: Job
    ) -> Iterator[tuple[Job, dict[str, Any]]]:  # fmt: skip
        """Yield all combinations of what ``transforms`` offer. Each sees the choices of those before it."""
        if not transforms:
            yield job, {}
            return
        transform, *others = transforms
        assert transform.planning.choices is not None
        offered: Mapping[str, Sequence[Any]] = transform.planning.choices.call(Mapping, transform.context(job))
        choices = {key: options for key, options in offered.items() if self.searched(key)}
        for chosen in itertools.product(*choices.values()):
            values = dict(zip(choices, chosen, strict=True))
            changed = replace(job, config=job.config.changed(values)) if values else job
            for each, more in self._settings(others, changed):
                yield each, {**values, **more}

    def _problems(self, transforms: Sequence[Transform], job: Job) -> Iterator[Problem]:
        for transform in transforms:
            context = transform.context(job)
            if transform.check is not None and transform.active(context):
                yield from transform.check.call_list(Problem, context)

    def workload(self, job: Job) -> Workload:
        """Return a job as numbers."""
        training = job.section(TrainingSection)
        wide = {2: "bf16"}.get(_bytes(training.mixed_precision_param), _fp32(training))
        work = Workload(
            job.mesh, job.batch.seq_len, job.batch.local_size, job.batch.microbatches,
            parameter_bytes=_bytes(training.mixed_precision_param), reduce_bytes=_bytes(training.mixed_precision_reduce),
            offloads=training.enable_cpu_offload, matmul_type=wide, wide_type=wide,
            optimizer=costs_of_optimizer(self.job.optimizer, job) or ADAMW,
        )  # fmt: skip
        for costs in costs_of(self.transforms, job):
            work = replace(
                work,
                kept=work.kept * costs.kept,
                recomputed=1 - (1 - work.recomputed) * (1 - costs.recomputed),
                fused=work.fused or costs.fused,
                matmul_type=costs.matmul_type or work.matmul_type,
                parameters_stay=work.parameters_stay or costs.parameters_stay,
                gradients_stay=work.gradients_stay or costs.gradients_stay,
                overlaps_matmuls=work.overlaps_matmuls or costs.overlaps_matmuls,
                passes_keys=work.passes_keys or costs.passes_keys,
                exchanges_heads=work.exchanges_heads * max(1, costs.exchanges_heads),
                exchanged_rows=work.exchanged_rows if costs.exchanged_rows is None else costs.exchanged_rows,
                graphed=work.graphed or costs.graphed,
                host_waits=work.host_waits + costs.host_waits,
                pipeline=costs.pipeline or work.pipeline,
            )
        return work


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


def _text(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else show(value)


def _bytes(dtype: str) -> int:
    return 2 if "16" in dtype else 4


def _fp32(training: TrainingSection) -> str:
    return "fp32" if training.float32_matmul_precision == "highest" else "tf32"
