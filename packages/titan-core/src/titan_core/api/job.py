"""An assembled job: everything that was decided before anything is built. Free of torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from titan_core.api.components import Component, Debugger, LRSchedule, Model, Objective, Optimizer, Tokenizer, Transform
from titan_core.api.config import Config
from titan_core.api.dataset import StreamSpec
from titan_core.api.errors import Problem, UserError
from titan_core.api.job_facts import JobFacts
from titan_core.api.registry import ComponentRegistry
from titan_core.api.sections import JobSection, ModelSection
from titan_core.api.tools.secrets import without_secrets

if TYPE_CHECKING:
    from titan_core.api.tokenizer import TextTokenizer


@dataclass(frozen=True)
class Job:
    """A valid job, ready for :func:`titan_core.train.trainer.train`."""

    facts: JobFacts
    registry: ComponentRegistry
    model: Model
    model_args: BaseModel
    """Those of its flavor, with ``[model.args]`` applied."""
    transforms: tuple[Transform, ...]
    """In the order of their application."""
    data: StreamSpec
    validation: StreamSpec | None
    """Read once from its beginning, each time."""
    tokenizer: Tokenizer
    text_tokenizer: TextTokenizer
    objective: Objective
    optimizer: Optimizer
    lr_schedule: LRSchedule
    checkpoint: Component | None
    """A :class:`~titan_core.api.checkpoint.Checkpoint`."""
    loggers: tuple[Component, ...]
    """Of class :class:`~titan_core.api.metric_log.MetricLogger`."""
    debuggers: tuple[Debugger, ...]

    @property
    def config(self) -> Config:
        """The resolved config."""
        return self.facts.config

    @property
    def dump_folder(self) -> str:
        """The run's directory."""
        return self.config.section(JobSection).dump_folder

    @property
    def name(self) -> str:
        """The model with its flavor."""
        return f"{self.model.name} {self.config.section(ModelSection).flavor}"

    def plugin_versions(self) -> list[dict[str, str]]:
        """Every plugin that took part in assembling the job."""
        return self.registry.versions()

    def identity(self) -> dict[str, Any]:
        """What all ranks must have in common: the resolved config, and each plugin with its version. Without secrets: it is
        written into checkpoints, and shown where ranks differ."""
        return self._identity(without_secrets(self.config.as_dict()))

    def _identity(self, config: dict[str, Any]) -> dict[str, Any]:
        return {
            "config": config,
            "plugins": {f"{one['distribution']}:{one['name']}": one["version"] for one in self.plugin_versions()},
        }

    def require_hardware(self) -> None:
        """Whether this machine can do what the job's transforms want of it.

        Raises:
            UserError: what it lacks.
        """
        problems: list[Problem] = []
        for transform in self.transforms:
            if transform.hardware is not None:
                problems += transform.hardware.load()(transform.context(self.facts))
        if problems:
            raise UserError(*problems)

    def digest(self) -> str:
        """SHA-256 of what :meth:`identity` holds, secrets included."""
        identity = self._identity(self.config.as_dict())
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
