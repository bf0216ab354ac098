"""Models with trained weights on disk, for commands that do not train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from titan_core.api.ref import Ref

if TYPE_CHECKING:
    from titan_core.api.events import ValidationReport
    from titan_core.api.job import Job
    from titan_core.api.model_part import ModelPart
    from titan_core.api.world import World


@dataclass(frozen=True)
class StoredModel:
    """Weights that a checkpoint plugin can load, and the model that they belong to."""

    path: str
    """The checkpoint or folder of weights."""
    sections: Mapping[str, Mapping[str, Any]]
    """Config sections by name, with the keys that describe the model, its tokenizer and, if known, the length of the
    sequences that it was trained on."""
    load: Ref[Callable[[WeightsContext], None]]
    """Loads the weights into a model, each rank those that it holds."""
    end_ids: tuple[int, ...] = ()
    """Token ids that end a text or a turn of a chat, in addition to the tokenizer's."""
    step: int | None = None
    """Optimizer steps that the weights were trained for, if known."""
    notes: tuple[str, ...] = ()
    """Differences between the model that the files describe and the model that the sections do, although both compute the
    same; one line each."""
    origin: Mapping[str, Any] = field(default_factory=dict)
    """Entries that describe the weights' origin, as plain values. Checkpoints of a run that starts from the weights keep
    them for exports."""


@dataclass(frozen=True)
class WeightsContext:
    """The argument of :attr:`StoredModel.load`."""

    job: Job
    world: World
    parts: list[ModelPart]
    stored: StoredModel


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to compute, divided over the ranks of a job."""

    job: Job
    world: World
    part: ModelPart
    """The model, in evaluation mode. Its parameters hold the stored weights."""


class StoredModels(Protocol):
    """Access to stored models, for a command (:attr:`titan_core.api.command.CommandContext.models`)."""

    def find(self, path: str) -> StoredModel:
        """The model at ``path``: a run's directory, a checkpoint, a folder of weights in another format, or the name of a
        downloaded model.

        Raises:
            UserError: no installed plugin can read it.
        """
        ...

    def job(
        self,
        stored: StoredModel,
        world_size: int | None = None,
        sections: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Job:
        """A job that can compute the model on ``world_size`` ranks (default: the fewest that the overrides allow).

        Args:
            sections: keys that the command adds to the stored sections. The command's overrides apply on top of both.

        Raises:
            UserError: all mistakes in the overrides.
        """
        ...

    def validate(self, loaded: LoadedModel) -> ValidationReport:
        """Measure the model's loss on the validation data of its job. Called on all ranks.

        Raises:
            UserError: the data cannot be read, or has no target tokens.
        """
        ...

    def open(self, job: Job, stored: StoredModel) -> AbstractContextManager[LoadedModel]:
        """Join the other ranks, build the model and load its weights.

        Raises:
            UserError: the weights are not those of the job's model, or the mesh divides layers or sequences.
        """
        ...
