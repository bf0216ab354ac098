"""An assembled job: every decision made before anything is built. Free of torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import BaseModel

from titan_core.api.commands.registry import Registry
from titan_core.api.config.resolved import Config
from titan_core.api.config.secrets import redact
from titan_core.api.config.sections import TrainingSection
from titan_core.api.data.components import Tokenizer
from titan_core.api.data.dataset import StreamSpec
from titan_core.api.data.tokenizer import TextTokenizer
from titan_core.api.model._trained_flops import TrainedFlops
from titan_core.api.model.components import Model
from titan_core.api.observe.components import Observer
from titan_core.api.parallel.components import Transform
from titan_core.api.plugins.component import Component
from titan_core.api.plugins.errors import Problem, UserError
from titan_core.api.plugins.job import Job
from titan_core.api.training.components import LRSchedule, Objective, Optimizer


@dataclass(frozen=True)
class RunStage:
    """A stage of a run: a part of it with a config of its own."""

    name: str
    first_step: int
    """The step after which it begins."""
    config: Config
    tokens_per_step: int


@dataclass(frozen=True, kw_only=True)
class AssembledJob(Job):
    """A valid job, ready for :func:`titan_core.loop.training.train`."""

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
    reference: AssembledJob | None = None
    """The same job with the model that the objective compares with (:attr:`titan_core.api.Objective.reference`)."""
    notes: tuple[str, ...] = ()
    """What a user should know about the job although nothing is wrong, one line each; includes :attr:`missing`."""
    stages: tuple[RunStage, ...] = ()
    """All stages of a run that has several (``[[stages]]``); the job is that of one of them."""
    stage: int = 0
    """Number of the job's stage."""
    restarted: bool = False
    """Whether the run has started again in the same processes (:attr:`titan_core.api.Run.restart`)."""
    missing: tuple[Problem, ...] = ()
    """Files that the job needs and that are not on this machine. Always empty for a job that trains; others may have been
    assembled without these files (``missing_ok`` of :meth:`titan_core.api.CommandContext.job`)."""

    @property
    def flops_per_token(self) -> float:
        """See :attr:`~titan_core.api.Job.flops_per_token`. The reference model runs forward only, which is a third; frozen
        parameters have fewer too, and to count them imports torch."""
        reference, length = self.reference, self.batch.seq_len
        of_reference = 0.0 if reference is None else reference.model.flops_per_token(reference.batch.seq_len) / 3.0
        trained = self.trained_flops
        return (self.model.flops_per_token(length) if trained is None else trained.per_token(length)) + of_reference

    @cached_property
    def trained_flops(self) -> TrainedFlops | None:
        """The operations of a model with frozen parameters; ``None`` if it has none. Imports torch in that case."""
        patterns = self.section(TrainingSection).freeze
        return TrainedFlops(self.model, patterns, bool(self.added)) if patterns else None

    @property
    def added(self) -> tuple[str, ...]:
        """Patterns of the parameters that transforms add to the model's (:attr:`~titan_core.api.Transform.adds`)."""
        return tuple(pattern for transform in self.transforms for pattern in transform.adds)

    @property
    def run_config(self) -> Config:
        """The config of the whole run: that of its first stage, which contains the others."""
        return self.stages[0].config if self.stages else self.config

    @property
    def first_step(self) -> int:
        """The step after which the job's stage begins."""
        return self.stages[self.stage].first_step if self.stages else 0

    @property
    def end_step(self) -> int:
        """The last step of the job's stage."""
        return min([self.steps, *(stage.first_step for stage in self.stages[self.stage + 1 :])])

    @property
    def knows_stages(self) -> bool:  # noqa: D102
        return True

    def tokens_before(self, step: int) -> int:  # noqa: D102
        if not self.stages:
            return super().tokens_before(step)
        ends = [stage.first_step for stage in self.stages[1:]] + [step]
        return sum(
            max(0, min(end, step) - stage.first_step) * stage.tokens_per_step
            for stage, end in zip(self.stages, ends, strict=True)
        )

    def stage_after(self, step: int) -> int:
        """Return the number of the stage that trains the step after ``step``."""
        return max((number for number, stage in enumerate(self.stages) if stage.first_step <= step), default=0)

    def planned_changes(self, step: int) -> tuple[str, ...]:
        """Return the keys that the job's stage changes, if ``step`` is the last one of the stage before it: a checkpoint of
        that step has the values of that stage. ``data.mixture`` includes the weights of the datasets."""
        if not self.stage or step != self.first_step:
            return ()
        before, now = (_flat(self.stages[number].config.as_dict()) for number in (self.stage - 1, self.stage))
        changed = [key for key in dict.fromkeys([*before, *now]) if before.get(key) != now.get(key)]
        data = any(key == "data.mixture" or key.startswith("training.dataset") for key in changed)
        return tuple(changed + ["data.mixture", "dataset.*.weight"] * data)

    def plugin_versions(self) -> list[dict[str, str]]:
        """Return name, distribution and version of every plugin that took part in assembling the job."""
        return self.registry.versions()

    def identity(self) -> dict[str, Any]:
        """Return what must be the same on all ranks: the resolved config, and the version of each plugin. It is written to
        checkpoints and shown when ranks differ, so it contains no secrets."""
        return self._identity(redact(self.config.as_dict()))

    def _identity(self, config: dict[str, Any]) -> dict[str, Any]:
        stages = [redact(dict(stage.table)) for stage in self.run_config.stages]
        return {
            "config": config,
            **({"stages": stages, "stage": self.stage} if stages else {}),
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
                problems += transform.checks.hardware.call_list(Problem, transform.context(self))
        if problems:
            raise UserError(*problems)

    def digest(self) -> str:
        """Return the SHA-256 of :meth:`identity`, but with secrets included."""
        identity = self._identity(self.config.as_dict())
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
