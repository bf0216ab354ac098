"""The job as components see it while it is assembled, and the contexts with which their code is called. Free of torch.

* :class:`BuildContext` holds the component's own section, an instance of its ``config`` class.
* :class:`JobContext` adds the job: config, mesh plan, batch plan and model layout.
* :class:`TrainingContext` adds the device mesh and the device, once training starts.

A kind that needs more defines a subclass, such as ``OptimizerContext``. Datasets and tokenizers do not see the job, because
the token stream must not depend on its mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from titan_core.api.config.resolved import Config
from titan_core.api.config.section import Section
from titan_core.api.config.sections import JobSection, ModelSection, TrainingSection
from titan_core.api.model.layout import ModelDefinition
from titan_core.api.parallel.mesh import MeshPlan

if TYPE_CHECKING:
    import torch

    from titan_core.api.parallel.job_mesh import JobMesh

S = TypeVar("S", bound=Section | None)
"""Type of a component's own section."""
T = TypeVar("T", bound=Section)


@dataclass(frozen=True)
class Job:
    """What a component may query about a job while it is assembled: the config, and the sizes of the job."""

    config: Config
    """The resolved config."""
    mesh: MeshPlan
    """The dimensions and views of the mesh, and their sizes."""
    batch: BatchPlan
    """The global batch and how ranks and microbatches divide it; sizes in sequences and tokens."""
    model: ModelDefinition
    """The model's layout, number of parameters and FLOPs."""
    trains: bool = True
    """Whether the job trains; otherwise it computes sequences of any length, such as the next token of a text."""
    fixes: bool = True
    """Whether checks should look for values that work. A plan, which tries thousands of jobs, reads no fix."""

    @property
    def name(self) -> str:
        """Name of the model and its flavor, or of the folder with its weights if it has no flavor."""
        section = self.config.section(ModelSection)
        return f"{section.name} {section.flavor or Path(section.from_pretrained or '').name}".rstrip()

    @property
    def dump_folder(self) -> str:
        """The run's directory."""
        return self.config.section(JobSection).dump_folder

    @property
    def model_name(self) -> str:
        """``model.name``."""
        return self.config.section(ModelSection).name

    @property
    def steps(self) -> int:
        """Number of optimizer steps of the whole run."""
        return self.config.section(TrainingSection).steps

    @property
    def seed(self) -> int:
        """``training.seed``."""
        return self.config.section(TrainingSection).seed

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations of the training of a token, forward and backward."""
        return self.model.flops_per_token(self.batch.seq_len)

    @property
    def knows_stages(self) -> bool:
        """Whether the job knows when the stages of its run begin: not while it is assembled. The check of a learning-rate
        schedule is called again when it does."""
        return not (self.config.stages or self.config.stage)

    def tokens_before(self, step: int) -> int:
        """Return the number of tokens, padding included, that the run reads in its first ``step`` steps, if
        :attr:`knows_stages`."""
        return step * self.batch.tokens_per_step

    def section(self, cls: type[T]) -> T:
        """Return the config section of class ``cls``."""
        return self.config.section(cls)


@dataclass(frozen=True)
class BatchPlan:
    """Sizes in sequences. ``global_size = ranks * microbatches * local_size``."""

    global_size: int
    """Sequences of a step."""
    local_size: int
    """Sequences of a rank's microbatch."""
    microbatches: int
    """Forward and backward passes per optimizer step (gradient accumulation)."""
    ranks: int
    """Ranks, or groups of ranks, that see different sequences."""
    logical_shards: int
    """Number of streams of the dataset; each contributes ``global_size / logical_shards`` sequences to every step."""
    seq_len: int
    """Tokens of a sequence."""

    @property
    def tokens_per_step(self) -> int:
        """Number of input tokens per optimizer step, over all ranks."""
        return self.global_size * self.seq_len


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
    """The device on which this rank computes."""
