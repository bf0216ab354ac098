"""The contexts with which the code of components is called, whatever their kind.

* :class:`BuildContext` holds the component's own section, an instance of its ``config`` class.
* :class:`JobContext` adds the job: config, mesh plan, batch plan and model layout.
* :class:`TrainingContext` adds the device mesh and the device, once training starts.

A kind that needs more defines a subclass, such as ``OptimizerContext``. Datasets and tokenizers do not see the job, because
the token stream must not depend on its mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from titan_core.api.config.resolved import Config
from titan_core.api.config.section import Section
from titan_core.api.plugins.job import Job

if TYPE_CHECKING:
    import torch

    from titan_core.api.parallel.job_mesh import JobMesh

S = TypeVar("S", bound=Section | None)


@dataclass(frozen=True, kw_only=True)
class BuildContext(Generic[S]):
    """The context that every component receives."""

    section: S
    """The component's own section; ``None`` for a component without ``config``."""


@dataclass(frozen=True, kw_only=True)
class JobContext(BuildContext[S]):
    """The context that a component receives while a job is assembled."""

    job: Job
    """The job: its config, mesh, batch and model."""

    @property
    def config(self) -> Config:
        """The resolved config, which knows the origin of each value: ``context.config.problem("my.key", why,
        fix)``."""
        return self.job.config


@dataclass(frozen=True, kw_only=True)
class TrainingContext(JobContext[S]):
    """The context that a component receives once training starts."""

    mesh: JobMesh
    """Has the plan's views, the dimension that takes the remaining ranks, and every other one that is larger than 1."""
    device: torch.device
