"""Turns ``dp_shard=2,tp=2`` into a job on that mesh with the reference's global batch. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from titan_core.api import CommandContext, MeshDim, MeshView, Problem, Registry, Transform, UserError
from titan_core.api.config.numbers import MOST_PROCESSES
from titan_core.api.config.resolved import Override
from titan_core.api.config.sections import TrainingSection
from titan_core.api.parallel.mesh import dims_in_order, sound_views
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.arguments import parse_integer
from titan_core.toolkit.errors import nearest
from titan_core.toolkit.text import shorten

ONE_DEVICE = "one device"


@dataclass(frozen=True)
class Mesh:
    """A mesh to train on."""

    degrees: Mapping[str, int]
    """Degrees of the dimensions that are larger than 1."""
    views: Mapping[str, int] = field(default_factory=dict)
    """Degrees of the views that are larger than 1."""

    @property
    def processes(self) -> int:
        """Number of ranks."""
        return math.prod(self.degrees.values())

    def __str__(self) -> str:
        dims, views = ([f"{name}={degree}" for name, degree in degrees.items()] for degrees in (self.degrees, self.views))
        return ", ".join([" x ".join(dims) or ONE_DEVICE, *views])


Dims = Sequence[MeshDim | MeshView]


def mesh_dims(registry: Registry) -> Dims:
    """Return the dimensions and views that the installed plugins define."""
    transforms = registry.all(Transform)
    dims = dims_in_order(dim for transform in transforms for dim in transform.mesh.dims)
    return (*dims, *sound_views((view for transform in transforms for view in transform.mesh.views), dims))


def parse_mesh(text: str, dims: Dims) -> Mesh:
    """Parse ``"dp_shard=2,tp=2"``, or ``"1"`` for one device.

    Raises:
        UserError: a dimension is unknown or repeated, or a degree is invalid.
    """
    degrees: dict[str, int] = {}
    names = [dim.name for dim in dims]
    for part in [] if text.strip() == "1" else text.split(","):
        name, _, degree = (piece.strip() for piece in part.partition("="))
        where = f"--mesh {shorten(text)}"
        if name not in names:
            raise UserError.one(where, f"unknown mesh dimension {shorten(name)!r}", nearest(name, names))
        number = parse_integer(degree, 1, MOST_PROCESSES)
        if number is None:
            why = f"the degree in {shorten(part.strip())!r} must be a whole number from 1 to {MOST_PROCESSES}"
            raise UserError.one(where, why, "write the mesh like --mesh dp_shard=2,tp=2")
        if name in degrees:
            raise UserError.one(where, f"repeats the dimension {name!r}", "remove one of its degrees")
        degrees[name] = number
    views = {dim.name for dim in dims if isinstance(dim, MeshView)}
    larger = {name: degree for name, degree in degrees.items() if degree > 1}
    return Mesh(
        {name: degree for name, degree in larger.items() if name not in views},
        {name: degree for name, degree in larger.items() if name in views},
    )


def overrides_for(mesh: Mesh, dims: Dims) -> list[Override]:
    """Return overrides that set every degree, so that the recipe's own mesh has no effect."""
    return [Override(dim.degree_key, str(mesh.degrees.get(dim.name, mesh.views.get(dim.name, 1)))) for dim in dims]


def job_on(mesh: Mesh, context: CommandContext, dims: Dims, more: Sequence[Override] = ()) -> AssembledJob:
    """Return the command's job on ``mesh``, with ``more`` overrides.

    Raises:
        UserError: the job cannot run on ``mesh``.
    """
    try:
        return context.job(mesh.processes, [*more, *overrides_for(mesh, dims)])
    except UserError as error:
        raise UserError(*(Problem(f"on {mesh}", str(problem)) for problem in error.problems)) from None


def same_batch(mesh: Mesh, reference: AssembledJob, dims: Dims) -> list[Override]:
    """Return overrides that give a job on ``mesh`` the global batch of ``reference``, in local batches no larger than the
    recipe's."""
    size = reference.batch.global_size
    share = size // math.prod(
        mesh.degrees.get(dim.name, 1) for dim in dims if isinstance(dim, MeshDim) and dim.divides == "batch"
    )
    local = reference.config.section(TrainingSection).local_batch_size
    fits = max((size for size in range(1, local + 1) if share and share % size == 0), default=local)
    return [Override("training.global_batch_size", str(size)), Override("training.local_batch_size", str(fits))]
