"""The interface between the trainer and a checkpoint plugin."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from titan_core.api.commands.registry import Registry
from titan_core.api.data.replay import SavedPosition
from titan_core.api.model.weights import StoredModel
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.api.plugins.component import Component
from titan_core.api.plugins.errors import Problem, UserError
from titan_core.api.plugins.job import JobContext, S
from titan_core.api.plugins.ref import Ref

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from titan_core.api.parallel.model_part import ModelPart
    from titan_core.api.parallel.world import World


@dataclass(frozen=True)
class RefusedChange:
    """A difference from the saved run that a resumed run must not have unless its user allows it."""

    key: str
    """The entry in ``checkpoint.allow_changed`` that allows it."""
    problem: Problem
    """The problem, without that entry."""
    allowable: bool = True
    """Whether that entry allows it; otherwise nothing does."""


def refused_changes(refused: Sequence[RefusedChange], allowed: Sequence[str]) -> UserError:
    """Return the error for ``refused`` changes: one problem each, and one list of keys that allows all of them.

    Args:
        allowed: the current value of ``checkpoint.allow_changed``, which the list includes.
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
    """A run's position in its data."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values: ``shards``, the position of each logical shard that this rank reads, by name; and
        ``stream_of``, the identity of the stream to which the positions belong."""

    def refused_changes(self, state: dict[str, Any], allowed: Sequence[str] = ()) -> list[RefusedChange]:
        """Return the reasons why the positions in ``state`` do not fit this stream, except for ``allowed`` changes."""

    def load_state_dict(self, state: dict[str, Any], allowed: Sequence[str] = ()) -> None:
        """Continue from the positions of all ranks.

        Args:
            allowed: patterns of the differences between the two streams that are allowed.

        Raises:
            UserError: the positions belong to another stream.
        """


class CheckpointEvents(Protocol):
    """The channel between a checkpoint plugin and the observers of a run."""

    def flush(self, step: int) -> None:
        """Flush observers before a checkpoint of ``step`` is taken. Raises if the step's values are bad."""

    def save_state(self) -> dict[str, Any]:
        """Return the state of observers, to be saved in the checkpoint."""

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Pass the observers' state from the restored checkpoint to the observers."""

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of observers by name, to save or to load into."""

    def checkpoint_saved(self, step: int, path: str) -> None:
        """Report that the checkpoint of ``step`` is complete."""

    def checkpoint_failed(self, step: int, why: str) -> None:
        """Report, after ``step``, that a checkpoint could not be written and the run continues without it."""


@dataclass
class TrainState:
    """Everything that must be restored for a run to resume as if it had never stopped."""

    parts: list[ModelPart]
    """This rank's parts of the model."""
    optimizer: Optimizer
    """The optimizer of all parts."""
    lr_scheduler: LRScheduler
    """The learning-rate schedule."""
    loader: DataPosition
    """The position in the data."""
    step: int = 0
    """Number of optimizer steps taken."""
    tokens_seen: int = 0
    """Number of target tokens trained on, over all ranks."""
    tokens_by_dataset: dict[str, int] = field(default_factory=dict)
    """Number of target tokens trained on, by dataset."""
    origin: Mapping[str, Any] = field(default_factory=dict)
    """:attr:`~titan_core.api.StoredModel.origin` of the weights that this run started from, for its
    checkpoints. A store that resumes a run keeps the entries of that run's checkpoint."""


@dataclass(frozen=True)
class CheckpointContext(JobContext[S]):
    """The context with which a checkpoint store is built."""

    job: AssembledJob
    """The job: its config, and the components that it selects."""
    world: World
    """All ranks, and this rank's place among them."""
    state: TrainState
    """What to save, and to restore in place."""
    lifecycle: CheckpointEvents
    """The states of observers, and where to report saved checkpoints."""
    lock_folder: Callable[[Path, str], None]
    """Locks a folder against other jobs until the run ends. Raises :class:`UserError` with its second argument as ``where``
    if another job has locked it. For rank 0 only: a job has one lock per folder."""


@runtime_checkable
class CheckpointStore(Protocol):
    """Saves and restores one run."""

    def restore(self) -> bool:
        """Restore the context's state from the newest checkpoint of the run, and return whether there is one. If there is
        none, leave the state unchanged, or load what another setting of the store requests."""

    def after_step(self, last: bool, requested: bool) -> None:
        """Save the state if a checkpoint is due after the step just taken. All ranks pass the same arguments.

        Args:
            last: no step follows, so the state must be saved unless it already is. If the data ends or a rank is asked to
                stop, this becomes known only before the next step would start; the call is then the second one for its step.
            requested: a user requested a checkpoint (SIGUSR1).
        """

    @property
    def newest(self) -> tuple[int, str] | None:
        """Step and path of the newest complete checkpoint that this run saved or resumed from."""

    def before_update(self) -> None:
        """Make the update that follows wait for pending copies of parameters and optimizer state, which it changes."""

    def close(self) -> None:
        """Finish pending writes."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Component):
    """A way to save and restore a run, to read models that something else has saved (``find_model`` alone), or both."""

    kind = "checkpoint"
    build: Ref[Callable[[CheckpointContext[Any]], CheckpointStore]] | None = None
    """Builds what saves and restores. Requires ``active``."""
    active: Callable[[JobContext[Any]], bool] | None = None
    """Whether the job is saved by what ``build`` returns."""
    check: Ref[Callable[[JobContext[Any]], Iterable[Problem]]] | None = None
    """Returns the reasons why the job cannot run, before anything is built. Called if active; must not import torch."""
    find_model: Ref[Callable[[str, Registry], StoredModel]] | None = None
    """(path, registry) -> the model at ``path``, or the one that a hub knows by this name; raises
    :class:`~titan_core.api.UserError` if there is none. Must not import torch."""
    describe_model: Ref[Callable[[str, Registry], Mapping[str, Mapping[str, Any]]]] | None = None
    """(path, registry) -> the config sections of the model that the files at ``path`` describe, or those of the model that a
    hub knows by this name. Its weights need not exist. Raises :class:`~titan_core.api.UserError` if there is none."""
    resumes_after: Ref[Callable[[JobContext[Any]], int]] | None = None
    """Returns the step of the checkpoint that a start of the job would resume from, 0 if there is none, without reading more
    than that. A run with stages needs it to know its stage. Must not import torch."""
    find_position: Ref[Callable[[JobContext[Any], int], SavedPosition | None]] | None = None
    """(context, step) -> the position in the data in the run's newest complete checkpoint of at most ``step`` steps;
    ``None`` if there is none. Must not import torch."""
    set_aside: Ref[Callable[[JobContext[Any], int], Sequence[str]]] | None = None
    """(context, step) -> the new places of the checkpoints of later steps and of their exports, which it moves to where no
    start of the job looks for them. Must not import torch."""
