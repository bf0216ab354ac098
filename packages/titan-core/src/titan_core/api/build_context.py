"""What a component's code is called with: one context, whatever the kind.

* :class:`BuildContext` holds the component's own section, an instance of the class that its ``config`` names.
* :class:`JobContext` adds the job: its config, mesh plan, batch plan and model layout.
* :class:`TrainingContext` adds the device mesh and the device, once training starts.

A kind that needs more subclasses one of them, next to its protocol: ``DatasetContext`` (:mod:`titan_core.api.dataset`),
``TokenizerContext`` (:mod:`titan_core.api.tokenizer`), ``OptimizerContext`` and ``LRScheduleContext``
(:mod:`titan_core.api.optimizer`), ``CheckpointContext`` (:mod:`titan_core.api.checkpoint`), ``LoggerContext``
(:mod:`titan_core.api.metric_log`). Datasets and tokenizers do not see the job: the token stream must not depend on its mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from titan_core.api.config import Config
from titan_core.api.job_facts import JobFacts
from titan_core.api.section import Section

if TYPE_CHECKING:
    import torch

    from titan_core.api.job_mesh import JobMesh

S = TypeVar("S", bound=Section | None)


@dataclass(frozen=True, kw_only=True)
class BuildContext(Generic[S]):
    """What every component receives."""

    section: S
    """The component's own section; ``None`` for a component without ``config``."""


@dataclass(frozen=True, kw_only=True)
class JobContext(BuildContext[S]):
    """What a component receives while a job is assembled."""

    facts: JobFacts
    """The job's sizes. Sections of the core are found here by class: ``context.facts.section(TrainingSection)``."""

    @property
    def config(self) -> Config:
        """The resolved config, to say where a value came from: ``context.config.problem("my.key", why, fix)``."""
        return self.facts.config


@dataclass(frozen=True, kw_only=True)
class TrainingContext(JobContext[S]):
    """What a component receives once training starts."""

    mesh: JobMesh
    """A named dimension for each of the plan's that is larger than 1, and ``dp_shard`` always; and its views."""
    device: torch.device
