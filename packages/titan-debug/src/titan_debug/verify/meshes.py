"""``dp_shard=2,tp=2`` to a job on that mesh, with the batch of the reference. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from titan_core.api.command import CommandContext
from titan_core.api.components import Transform
from titan_core.api.config import Override
from titan_core.api.errors import UserError, nearest
from titan_core.api.job import Job
from titan_core.api.mesh import MeshDim, MeshView, dims_in_order, sound_views
from titan_core.api.numbers import MOST_PROCESSES
from titan_core.api.registry import ComponentRegistry
from titan_core.api.sections import TrainingSection
from titan_core.api.tools.arguments import parse_whole
from titan_core.api.tools.shown import shorten

ONE_DEVICE = "one device"


@dataclass(frozen=True)
class Mesh:
    """A mesh to train on."""

    degrees: Mapping[str, int]
    """Of the dimensions that are larger than 1."""
    views: Mapping[str, int] = field(default_factory=dict)
    """Degrees of the views that are larger than 1."""

    @property
    def processes(self) -> int:
        """How many ranks it has."""
        return math.prod(self.degrees.values())

    def __str__(self) -> str:
        dims, views = ([f"{name}={degree}" for name, degree in degrees.items()] for degrees in (self.degrees, self.views))
        return ", ".join([" x ".join(dims) or ONE_DEVICE, *views])


Dims = Sequence[MeshDim | MeshView]


def mesh_dims(registry: ComponentRegistry) -> Dims:
    """The dimensions and views that the installed plugins know."""
    transforms = registry.all(Transform)
    dims = dims_in_order(dim for transform in transforms for dim in transform.mesh_dims)
    return (*dims, *sound_views((view for transform in transforms for view in transform.mesh_views), dims))


def parse_mesh(text: str, dims: Dims) -> Mesh:
    """``"dp_shard=2,tp=2"``, or ``"1"`` for one device.

    Raises:
        UserError: no such dimension, or no degree.
    """
    degrees: dict[str, int] = {}
    names = [dim.name for dim in dims]
    for part in [] if text.strip() == "1" else text.split(","):
        name, _, degree = (one.strip() for one in part.partition("="))
        if name not in names:
            raise UserError.one(f"--mesh {text}", f"there is no mesh dimension {name!r}", nearest(name, names))
        number = parse_whole(degree, 1, MOST_PROCESSES)
        if number is None or name in degrees:
            why = f"{shorten(part.strip())!r} is no degree from 1 to {MOST_PROCESSES}"
            raise UserError.one(f"--mesh {shorten(text)}", why, "write it as in --mesh dp_shard=2,tp=2")
        degrees[name] = number
    views = {dim.name for dim in dims if isinstance(dim, MeshView)}
    larger = {name: degree for name, degree in degrees.items() if degree > 1}
    return Mesh(
        {name: degree for name, degree in larger.items() if name not in views},
        {name: degree for name, degree in larger.items() if name in views},
    )


def overrides_for(mesh: Mesh, dims: Dims) -> list[Override]:
    """Every degree of the config, so that a recipe's own mesh does not matter."""
    return [Override(dim.degree_key, str(mesh.degrees.get(dim.name, mesh.views.get(dim.name, 1)))) for dim in dims]


def job_on(mesh: Mesh, context: CommandContext, dims: Dims, more: Sequence[Override] = ()) -> Job:
    """The command's job on ``mesh``, with ``more`` overrides.

    Raises:
        UserError: it is impossible there.
    """
    try:
        return context.job(mesh.processes, [*more, *overrides_for(mesh, dims)])
    except UserError as error:
        told = (UserError.one(f"on {mesh}", str(problem)).problems[0] for problem in error.problems)
        raise UserError(*told) from None


def same_batch(mesh: Mesh, reference: Job, dims: Dims) -> list[Override]:
    """What gives a job on ``mesh`` the global batch of ``reference``, in local batches no larger than the recipe's."""
    size = reference.facts.batch.global_size
    share = size // math.prod(
        mesh.degrees.get(dim.name, 1) for dim in dims if isinstance(dim, MeshDim) and dim.divides == "batch"
    )
    local = reference.config.section(TrainingSection).local_batch_size
    fits = max((one for one in range(1, local + 1) if share and share % one == 0), default=local)
    return [Override("training.global_batch_size", str(size)), Override("training.local_batch_size", str(fits))]
