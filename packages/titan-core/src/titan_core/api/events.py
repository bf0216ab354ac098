"""What lifecycle hooks receive."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from titan_core.api.batch import Batch
    from titan_core.api.job import Job
    from titan_core.api.model_part import ModelPart
    from titan_core.api.shared_request import SharedRequest
    from titan_core.api.world import World


@dataclass(frozen=True)
class RunStart:
    """A run that is about to take its first step."""

    job: Job
    world: World
    parts: list[ModelPart]
    """This rank's parts of the model."""
    step: int
    """Steps already taken: 0, or the step of the checkpoint that was restored."""
    steps: int
    """The step after which training ends."""
    dump_folder: str
    attempt: float
    """When it began, on rank 0's clock, in seconds since the epoch: the same on all ranks, and another than that of earlier
    attempts at the run."""
    report: Callable[[Finding], None]
    """For an observer that finds something out: fires the hook ``titan_finding``, on this rank."""
    shared_request: Callable[[], SharedRequest]
    """For an observer that serves requests on all ranks together: a new request. To be called by
    all ranks alike, in ``titan_train_start``."""


@dataclass(frozen=True)
class Finding:
    """Something that an observer wants to show the user: a spike of the loss, a trace that was written."""

    kind: str
    """In a word or two: ``"loss spike"``, ``"trace"``."""
    message: str
    """One line."""
    step: int


@dataclass(frozen=True)
class PendingUpdate:
    """A step whose gradients are complete and not clipped yet, and whose update has not begun. Its tensors may still be in
    flight on the device; reading one waits for it."""

    step: int
    loss: Tensor
    """As in :class:`StepReport`."""
    rank_losses: Tensor
    """As in :class:`StepReport`."""
    grad_norm: Tensor
    """As in :class:`StepReport`."""
    microbatches: Sequence[Batch]
    """What this rank has computed with, on its device."""
    repeat_forward: Callable[[], Tensor]
    """Repeats the step's forward pass with the weights as they still are, in training mode, and returns this rank's share of
    the loss, summed over targets. All ranks must call it together. It leaves gradients, buffers and random generators as
    they were."""


@dataclass(frozen=True)
class StepReport:
    """One optimizer step. The tensors may still be in flight on the device; reading one waits for it."""

    step: int
    loss: Tensor
    """Mean over the target tokens of the global batch; a scalar, the same on every rank."""
    rank_losses: Tensor
    """Mean over the target tokens of each data-parallel rank's part of it, ``[data ranks]``; the same on every rank."""
    grad_norm: Tensor
    """Global norm of the gradients before clipping; a scalar, the same on every rank (of the same copy of the weights)."""
    lr: float
    """The learning rate of this step (of the first parameter group)."""
    num_targets: int
    """Target tokens of the global batch."""
    epoch: int
    """How many times this rank's data was read to its end."""
    data_seconds: float
    """How long this rank waited for its data."""
    corrupt: int = 0
    """Corrupt records that all ranks have skipped since the job was started."""
    empty: int = 0
    """Empty documents that all ranks have left out since the job was started."""
    auxiliary: Mapping[str, Tensor] = field(default_factory=dict)
    """Auxiliary losses (:mod:`titan_core.api.auxiliary_loss`) by name, divided by the positions of the global batch;
    scalars, the same on every rank."""
    skipped: bool = False
    """Whether the update was left out (:func:`titan_core.api.hookspecs.titan_before_update`)."""


@dataclass(frozen=True)
class ValidationReport:
    """One measurement of the loss on other data; the same on every rank."""

    step: int
    """The step after which it was made."""
    loss: float
    """Mean over the target tokens."""
    num_targets: int
    num_batches: int
    """Global batches."""
    seconds: float


@dataclass(frozen=True)
class TrainEnd:
    """How a run ended."""

    step: int
    """The last step that was taken."""
    completed: bool
    """Whether this is the last step that the config requests."""
    reason: str
    """In words."""
    failed: bool = False
    """Whether an exception ended it."""
    preempted: bool = False
    """Whether SIGTERM ended it, after a whole step: it wants to be started again."""
    interrupted: bool = False
    """Whether a person ended it by an interrupt (Ctrl-C), after a whole step."""
