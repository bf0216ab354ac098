"""An assembled job: every decision made before anything is built. Free of torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from titan_core.api._secrets import redact
from titan_core.api.commands.registry import Registry
from titan_core.api.data.components import Tokenizer
from titan_core.api.data.dataset import StreamSpec
from titan_core.api.data.tokenizer import TextTokenizer
from titan_core.api.model.components import Model
from titan_core.api.observe.components import Observer
from titan_core.api.parallel.components import Transform
from titan_core.api.plugins.component import Component
from titan_core.api.plugins.errors import Problem, UserError
from titan_core.api.plugins.job import Job
from titan_core.api.training.components import LRSchedule, Objective, Optimizer


@dataclass(frozen=True, kw_only=True)
class AssembledJob(Job):
    """A valid job, ready for :func:`titan_core.loop.trainer.train`."""

    registry: Registry
    family: Model
    model_args: BaseModel
    """The arguments of the flavor, with ``[model.args]`` applied."""
    transforms: tuple[Transform, ...]
    """In the order in which they are applied."""
    data: StreamSpec
    validation: StreamSpec | None
    """Each validation reads each of its datasets once, from its start."""
    tokenizer: Tokenizer
    text_tokenizer: TextTokenizer
    objective: Objective
    optimizer: Optimizer
    lr_schedule: LRSchedule
    checkpoint: Component | None
    """An instance of :class:`~titan_core.api.Checkpoint`."""
    observers: tuple[Observer, ...]
    frozen: AssembledJob | None = None
    """The same job with the model that the objective compares with (:attr:`titan_core.api.Objective.frozen`)."""
    notes: tuple[str, ...] = ()
    """What a user should know about the job although nothing is wrong, one line each; includes :attr:`missing`."""
    missing: tuple[Problem, ...] = ()
    """Files that the job needs and that are not on this machine. Always empty for a job that trains; others may have been
    assembled without these files (``missing_ok`` of :meth:`titan_core.api.CommandContext.job`)."""

    @property
    def flops_per_token(self) -> float:
        """See :attr:`~titan_core.api.Job.flops_per_token`. The frozen model runs forward only, which is a third."""
        of_frozen = 0.0 if self.frozen is None else self.frozen.flops_per_token / 3.0
        return self.model.flops_per_token(self.batch.seq_len) + of_frozen

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
            if transform.checks.hardware is not None:
                problems += transform.checks.hardware.load()(transform.context(self))
        if problems:
            raise UserError(*problems)

    def digest(self) -> str:
        """Return the SHA-256 of :meth:`identity`, but with secrets included."""
        identity = self._identity(self.config.as_dict())
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
