"""Models with trained weights on disk, for commands that do not train."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from titan_core.api.model.weights import StoredModel
from titan_core.api.plugins.assembled_job import AssembledJob

if TYPE_CHECKING:
    from titan_core.api.observe.events import ValidationReport
    from titan_core.api.parallel.model_part import ModelPart
    from titan_core.api.parallel.world import World


@dataclass(frozen=True)
class WeightsContext:
    """The argument of :attr:`StoredModel.load`."""

    job: AssembledJob
    """The job: its config, and the components that it selects."""
    world: World
    """All ranks, and this rank's place among them."""
    parts: list[ModelPart]
    """This rank's parts of the model, whose parameters are filled in place."""
    stored: StoredModel
    """The model to load."""


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to compute, divided over the ranks of a job."""

    job: AssembledJob
    """The job that computes with the model; it trains nothing."""
    world: World
    """All ranks, and this rank's place among them."""
    part: ModelPart
    """The model, in evaluation mode. Its parameters hold the stored weights."""


class StoredModels(Protocol):
    """Access to stored models, for a command (:attr:`titan_core.api.CommandContext.models`)."""

    def find(self, path: str) -> StoredModel:
        """The model at ``path``: a run's directory, a checkpoint, a folder of weights in another format, or the name of a
        downloaded model.

        Raises:
            UserError: no installed plugin can read it.
        """

    def describe(self, name: str) -> Mapping[str, Mapping[str, Any]]:
        """The config sections of a model without its weights. ``name`` is a folder with its config file, its name on a hub,
        or ``FAMILY/FLAVOR`` of an installed model. May import torch.

        Raises:
            UserError: there is no such model, or no installed plugin supports it.
        """

    def job(
        self,
        stored: StoredModel,
        world_size: int | None = None,
        sections: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> AssembledJob:
        """A job that can compute the model on ``world_size`` ranks (default: the fewest that the overrides allow).

        Args:
            sections: keys that the command adds to the stored sections. The command's overrides apply on top of both.

        Raises:
            UserError: all mistakes in the overrides.
        """

    def validate(self, loaded: LoadedModel) -> ValidationReport:
        """Measure the model's loss on the validation data of its job. Called on all ranks.

        Raises:
            UserError: the data cannot be read, or has no target tokens.
        """

    def open(self, job: AssembledJob, stored: StoredModel) -> AbstractContextManager[LoadedModel]:
        """Join the other ranks, build the model and load its weights.

        Raises:
            UserError: the weights are not those of the job's model, or the mesh divides layers or sequences.
        """
