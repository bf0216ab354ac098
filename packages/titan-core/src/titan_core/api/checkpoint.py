"""The seam between the trainer and a checkpoint plugin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from titan_core.api.job import Job
from titan_core.api.model_part import ModelPart
from titan_core.data.loader import DataLoader
from titan_core.plugins.lifecycle import Lifecycle
from titan_core.train.world import World


@dataclass
class TrainState:
    """Everything that a run must restore to continue as if it had not stopped."""

    parts: list[ModelPart]
    optimizer: Optimizer
    lr_scheduler: LRScheduler
    loader: DataLoader
    step: int = 0
    """Optimizer steps taken."""
    tokens_seen: int = 0
    """Target tokens trained on, over all ranks."""
    tokens_by_dataset: dict[str, int] = field(default_factory=dict)
    """The same, by dataset."""


@dataclass(frozen=True)
class CheckpointRequest:
    """What a checkpoint plugin is built with."""

    job: Job
    world: World
    state: TrainState
    lifecycle: Lifecycle
    """What observers are to hear: ``settle`` with the step before a checkpoint of it is taken, which raises where its
    numbers are bad; ``save_state`` for what they want to be kept in it, ``restore_state`` with that; ``state_tensors`` for
    the tensors to save, and to load into before ``restore_state``; and ``checkpoint_saved`` once it is complete."""
    hold: Callable[[Path, str], None]
    """Holds a folder against other jobs until the run ends, or raises :class:`~titan_core.api.errors.UserError` with its second
    argument as the place. For rank 0: a job has one lock for each folder."""


class CheckpointStore(Protocol):
    """Saves and restores one run."""

    def restore(self) -> None:
        """Bring the request's state to the newest checkpoint; leave it as it is where there is none."""
        ...

    def after_step(self, last: bool, asked: bool) -> None:
        """Save the state, where that is due after the step that was just taken. The same on all ranks.

        Args:
            last: no other step follows. Where the data ends, or a rank was asked to stop, this shows only when the next step
                was to begin: the call is then the second one for its step.
            asked: a user requests a checkpoint (SIGUSR1).
        """
        ...

    def before_update(self) -> None:
        """The optimizer is about to change parameters and its state: what is copied from them must be copied by now."""
        ...

    def close(self) -> None:
        """Finish what is being written."""
        ...
