"""The seam between the trainer and a checkpoint plugin."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from titan_core.api.build_context import JobContext, S
from titan_core.api.components import Component
from titan_core.api.errors import Problem, UserError
from titan_core.api.job import Job
from titan_core.api.ref import Ref

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from titan_core.api.model_part import ModelPart
    from titan_core.api.world import World


@dataclass(frozen=True)
class RefusedChange:
    """Something that a resumed run must not have otherwise than the run that was saved, unless its user allows it."""

    key: str
    """What allows it in ``checkpoint.allow_changed``."""
    problem: Problem
    """Without that key."""
    allowable: bool = True


def refusal(refused: Sequence[RefusedChange], allowed: Sequence[str]) -> UserError:
    """The error of ``refused`` changes: each by itself, and one list of keys that allows all of them.

    Args:
        allowed: the present value of ``checkpoint.allow_changed``, which the list keeps.
    """
    keys = list(dict.fromkeys([*allowed, *(change.key for change in refused if change.allowable)]))
    hint = f"checkpoint.allow_changed = {json.dumps(keys, ensure_ascii=False)}"
    problems = list(dict.fromkeys(change.problem for change in refused))
    if not all(change.allowable for change in refused):
        return UserError(*problems)
    if len(problems) == 1:
        problem = problems[0]
        return UserError(replace(problem, fix=f"{problem.fix}; or, to continue with the change, {hint}"))
    return UserError(*problems, Problem("", f"to continue with all of these changes, {hint}"))


class DataPosition(Protocol):
    """The place in the data that a run has reached."""

    def state_dict(self) -> dict[str, Any]:
        """``shards``: the position of each logical shard that this rank reads, by name. ``stream_of``: what identifies the
        stream that they are positions in. Plain values."""
        ...

    def refused_changes(self, state: dict[str, Any], allowed: Sequence[str] = ()) -> list[RefusedChange]:
        """What keeps the positions of ``state`` from being positions in this stream, ``allowed`` changes apart."""
        ...

    def load_state_dict(self, state: dict[str, Any], allowed: Sequence[str] = ()) -> None:
        """Continue from the positions of all ranks together.

        Args:
            allowed: patterns of what may differ between the two streams.

        Raises:
            UserError: they are positions in another stream.
        """
        ...


class CheckpointEvents(Protocol):
    """What a checkpoint plugin reports to the observers of a run."""

    def flush(self, step: int) -> None:
        """Before a checkpoint of ``step`` is taken; raises where the step's numbers are bad."""
        ...

    def save_state(self) -> dict[str, Any]:
        """What observers keep in the checkpoint."""
        ...

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """What observers kept in the checkpoint that was restored."""
        ...

    def state_tensors(self) -> dict[str, Tensor]:
        """Observers' tensors by name, to save and to load into."""
        ...

    def checkpoint_saved(self, step: int, path: str) -> None:
        """The checkpoint of ``step`` is complete."""
        ...


@dataclass
class TrainState:
    """Everything that a run must restore to continue as if it had not stopped."""

    parts: list[ModelPart]
    optimizer: Optimizer
    lr_scheduler: LRScheduler
    loader: DataPosition
    step: int = 0
    """Optimizer steps taken."""
    tokens_seen: int = 0
    """Target tokens trained on, over all ranks."""
    tokens_by_dataset: dict[str, int] = field(default_factory=dict)
    """The same, by dataset."""


@dataclass(frozen=True)
class CheckpointContext(JobContext[S]):
    """What a checkpoint store is built with."""

    job: Job
    world: World
    state: TrainState
    lifecycle: CheckpointEvents
    hold: Callable[[Path, str], None]
    """Holds a folder against other jobs until the run ends, or raises :class:`UserError` with its second
    argument as the place. For rank 0: a job has one lock for each folder."""


class CheckpointStore(Protocol):
    """Saves and restores one run."""

    def restore(self) -> None:
        """Bring the context's state to the newest checkpoint; leave it as it is where there is none."""
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


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Component):
    """A way of saving and restoring a run."""

    kind = "checkpoint"
    build: Ref[Callable[[CheckpointContext[Any]], CheckpointStore]]
    active: Callable[[JobContext[Any]], bool]
