"""The job as components see it while it is assembled. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from titan_core.api.config.resolved import Config
from titan_core.api.config.section import Section
from titan_core.api.config.sections import JobSection, ModelSection, TrainingSection
from titan_core.api.model.layout import ModelDefinition
from titan_core.api.parallel.mesh import MeshPlan
from titan_core.api.training.batch_plan import BatchPlan

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Job:
    """What a component may query about a job while it is assembled: the config, and the sizes of the job."""

    config: Config
    mesh: MeshPlan
    batch: BatchPlan
    model: ModelDefinition
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

    def section(self, cls: type[S]) -> S:
        """Return the config section of class ``cls``."""
        return self.config.section(cls)
