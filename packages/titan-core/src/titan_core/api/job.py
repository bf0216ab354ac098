"""An assembled job: every decision made before anything is built. Free of torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from titan_core.api.components import Component, Debugger, LRSchedule, Model, Objective, Optimizer, Tokenizer, Transform
from titan_core.api.config import Config
from titan_core.api.dataset import StreamSpec
from titan_core.api.errors import Problem, UserError
from titan_core.api.job_facts import JobFacts
from titan_core.api.registry import ComponentRegistry
from titan_core.api.sections import JobSection, ModelSection
from titan_core.api.tokenizer import TextTokenizer
from titan_core.api.tools.secrets import redact, redact_text


def note_of(problem: Problem) -> str:
    """Return ``problem``, something that this machine lacks, as a note for a command that only looks at the job. Secrets are
    removed."""
    return redact_text(str(replace(problem, why=f"{problem.why} (needed where the job trains)")))


@dataclass(frozen=True)
class JobFact:
    """A line of `titan job show` from a plugin (hook ``titan_job_facts``)."""

    name: str
    """A word or two, unique among all facts."""
    text: str
    """One line."""
    value: Any
    """The same as plain values, for ``--json``."""


@dataclass(frozen=True)
class Job:
    """A valid job, ready for :func:`titan_core.train.trainer.train`."""

    facts: JobFacts
    registry: ComponentRegistry
    model: Model
    model_args: BaseModel
    """The arguments of the flavor, with ``[model.args]`` applied."""
    transforms: tuple[Transform, ...]
    """In the order in which they are applied."""
    data: StreamSpec
    validation: StreamSpec | None
    """Each validation reads it once, from its start."""
    tokenizer: Tokenizer
    text_tokenizer: TextTokenizer
    objective: Objective
    optimizer: Optimizer
    lr_schedule: LRSchedule
    checkpoint: Component | None
    """An instance of :class:`~titan_core.api.checkpoint.Checkpoint`."""
    loggers: tuple[Component, ...]
    """Instances of :class:`~titan_core.api.metric_log.MetricLogger`."""
    debuggers: tuple[Debugger, ...]
    notes: tuple[str, ...] = ()
    """What a user should know about the job although nothing is wrong, one line each; includes :attr:`missing`."""
    missing: tuple[Problem, ...] = ()
    """Files that the job needs and that are not on this machine. Always empty for a job that trains; others may have been
    assembled without these files (``missing_ok`` of :meth:`titan_core.api.command.CommandContext.job`)."""

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
        """Name of the model and its flavor, or of the folder with its weights if it has no flavor."""
        section = self.config.section(ModelSection)
        return f"{self.model.name} {section.flavor or Path(section.from_pretrained or '').name}".rstrip()

    def plugin_versions(self) -> list[dict[str, str]]:
        """Return name, distribution and version of every plugin that took part in assembling the job."""
        return self.registry.versions()

    def identity(self) -> dict[str, Any]:
        """Return what must be the same on all ranks: the resolved config, and the version of each plugin. It is written to
        checkpoints and shown when ranks differ, so it contains no secrets."""
        return self._identity(redact(self.config.as_dict()))

    def _identity(self, config: dict[str, Any]) -> dict[str, Any]:
        return {
            "config": config,
            "plugins": {
                f"{plugin['distribution']}:{plugin['name']}": plugin["version"] for plugin in self.plugin_versions()
            },
        }

    def require_hardware(self) -> None:
        """Check that this machine can run the job's transforms.

        Raises:
            UserError: lists what the machine lacks.
        """
        problems: list[Problem] = []
        for transform in self.transforms:
            if transform.hardware is not None:
                problems += transform.hardware.load()(transform.context(self.facts))
        if problems:
            raise UserError(*problems)

    def digest(self) -> str:
        """Return the SHA-256 of :meth:`identity`, but with secrets included."""
        identity = self._identity(self.config.as_dict())
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
