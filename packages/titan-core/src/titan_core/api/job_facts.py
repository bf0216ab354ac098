"""The job as components see it while it is assembled. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from titan_core.api.batch_plan import BatchPlan
from titan_core.api.config import Config
from titan_core.api.layout import ModelDefinition
from titan_core.api.mesh import MeshPlan
from titan_core.api.section import Section

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class JobFacts:
    """What a component may query about a job while it is assembled: the config, and the sizes of the job."""

    config: Config
    mesh: MeshPlan
    batch: BatchPlan
    model: ModelDefinition
    trains: bool = True
    """Whether the job trains; otherwise it computes sequences of any length, such as the next token of a text."""
    fixes: bool = True
    """Whether checks should look for values that work. A plan, which tries thousands of jobs, reads no fix."""

    def section(self, cls: type[S]) -> S:
        """Return the config section of class ``cls``."""
        return self.config.section(cls)
