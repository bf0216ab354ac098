"""The values that lifecycle hooks receive."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from titan_core.api.checkpoint.store import CheckpointEvents, TrainState
    from titan_core.api.observe.shared_request import SharedRequest
    from titan_core.api.parallel.model_part import ModelPart
    from titan_core.api.parallel.world import World
    from titan_core.api.plugins.assembled_job import AssembledJob
    from titan_core.api.training.batch import Batch, ObjectiveFunction


@dataclass(frozen=True)
class ModelSize:
    """Number of parameters of a whole model; a tied parameter counts once."""

    parameters: int
    non_embedding: int
    """Without those of the modules in the layout's ``embedding``. A head that is tied with the embedding is not counted
    either."""


@dataclass(frozen=True)
class Run:
    """A run that is about to start its first step."""

    job: AssembledJob
    """The job: its config, and the components that it selects."""
    world: World
    """All ranks, and this rank's place among them."""
    parts: list[ModelPart]
    """This rank's parts of the model."""
    state: TrainState
    """Everything that makes the run resume as if it had never stopped. A step runner that copies the state of another
    replica of the job changes it in place, and raises :class:`~titan_core.api.StepAbandoned`."""
    observers: CheckpointEvents
    """The part of that state that observers keep."""
    size: ModelSize
    """Size of the whole model, counted in the model itself."""
    step: int
    """Number of steps already taken: 0, or the step of the restored checkpoint."""
    steps: int
    """The step after which training ends."""
    dump_folder: str
    """The run's directory."""
    attempt: float
    """Start of this attempt at the run, on rank 0's clock, in seconds since the epoch. The same on all ranks, and different
    for each attempt."""
    report: Callable[[Finding], None]
    """Reports an observer's finding: fires the hook ``titan_finding`` on this rank."""
    shared_request: Callable[[], SharedRequest]
    """Returns a new request that all ranks serve together. All ranks must call it equally often, in
    ``titan_train_start``."""
    evaluation: Callable[[], AbstractContextManager[None]]
    """Returns a context for an observer's own forward passes: evaluation mode, without gradients and without the compiler
    (shapes may differ from those of training). On exit, gradients, buffers, modes and random generators are as they were.
    The time within does not count as training time. All ranks must enter together."""
    compute: Callable[[Sequence[Batch], ObjectiveFunction], None]
    """Runs the model forward on microbatches of this rank, as many as in a step and of the same shape. The objective takes
    the place of the job's: it receives the logits on the ranks that have the last layers, for their positions and columns of
    the vocabulary. For use within :attr:`evaluation`; all ranks must call it together."""
    log: Callable[[Record], None]
    """Logs a record of metrics of its own, like that of a validation: fires the hook ``titan_metrics``. It has ``step`` and
    ``time``. Call it on rank 0 only."""
    validate: Callable[[str], ValidationReport | None]
    """Measures the validation loss with the present weights, as those of an average, and fires ``titan_validation_end`` with
    a report of that name, which must not be empty. ``None`` if the job does not validate or a rank must stop. For
    ``titan_validation_end`` of a report without name and dataset; all ranks must call it together, and put the weights
    back."""
    restart: Callable[[Callable[[], None]], None]
    """Ends the attempt after the present step, without a checkpoint of it. Once all files are closed, rank 0 calls the
    function, and the run starts again in the same processes, from the newest checkpoint that there is then. For
    ``titan_step_end``; all ranks must call it at the same step."""
    show: Callable[[Sample], None]
    """Reports a text that the model wrote: fires the hook ``titan_sample`` on this rank. Call it on rank 0 only."""


@dataclass(frozen=True)
class Finding:
    """An observation to show to the user, such as a loss spike or a new trace."""

    kind: str
    """A word or two: ``"loss spike"``, ``"trace"``."""
    message: str
    """One line of text."""
    step: int
    """The step that it concerns."""


@dataclass(frozen=True)
class Sample:
    """A text that the model wrote during a run."""

    step: int
    """The last step before it."""
    prompt: str
    """The text that the model continued."""
    text: str
    """The continuation, without the prompt."""


@dataclass(frozen=True)
class PendingUpdate:
    """A step before its update: gradients are complete, but not clipped yet. The tensors may still be in flight on the
    device; reading one waits for the device."""

    step: int
    """Number of the step, from 1."""
    loss: Tensor
    """See :class:`StepReport`."""
    rank_losses: Tensor
    """See :class:`StepReport`."""
    grad_norm: Tensor
    """See :class:`StepReport`."""
    microbatches: Sequence[Batch]
    """This rank's share of the step's global batch, on its device. The sequences are whole, also where ranks divide their
    positions; ranks that see the same sequences all have them."""
    repeat_forward: Callable[[], Tensor]
    """Repeats the step's forward pass in training mode with the present weights, and returns this rank's share of the loss,
    summed over targets. All ranks must call it together. It leaves gradients, buffers and random generators unchanged. It
    may be called later too, as long as the weights are those of the step: until the next update that is not skipped."""
    repeat_backward: Callable[..., AbstractContextManager[None]]
    """Returns a context within which the parameters have the gradients of this step, computed again like
    :attr:`repeat_forward`: for observers that look at a step once the next one has replaced its gradients. The argument, if
    any, are the microbatches of another rank, which this one then computes instead of its own."""


@dataclass(frozen=True)
class StepReport:
    """One optimizer step. The tensors may still be in flight on the device; reading one waits for the device."""

    step: int
    """Number of the step, from 1."""
    loss: Tensor
    """Mean over the target tokens of the global batch; a scalar, the same on every rank."""
    rank_losses: Tensor
    """Mean over each data-parallel rank's target tokens, ``[data ranks]``; the same on every rank."""
    grad_norm: Tensor
    """Global gradient norm before clipping; a scalar, the same on every rank that trains the same replica."""
    lr: float
    """Learning rate of this step, for the first parameter group."""
    num_targets: int
    """Number of target tokens in the global batch."""
    epoch: int
    """Number of complete passes over this rank's data."""
    data_seconds: float
    """Seconds that this rank waited for its data."""
    corrupt: int = 0
    """Number of corrupt records that all ranks have skipped since the job started."""
    empty: int = 0
    """Number of empty documents that all ranks have skipped since the job started."""
    auxiliary: Mapping[str, Tensor] = field(default_factory=dict)
    """Auxiliary losses (:func:`~titan_core.api.add_auxiliary_loss`) by name, divided by the number of positions in the
    global batch; scalars, the same on every rank."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Metrics of the objective (:func:`~titan_core.api.add_metric`) by name: means over the global batch, NaN if no weight
    is positive; fp64 scalars, the same on every rank."""
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    """What modules counted (:func:`~titan_core.api.add_statistic`) by name: sums over the global batch, int64, exactly the
    same on every rank and in every replica group of titan-ft. A step whose update was skipped has them too."""
    skipped: bool | Tensor = False
    """Whether an observer skipped the update (:func:`titan_core.api.hookspecs.titan_before_update`); a 0-d bool tensor if
    the device decided. What changes with each update, such as a buffer that balances experts, should then stay as it is:
    ``buffer.add_(torch.where(torch.as_tensor(report.skipped, device=buffer.device), 0, change))`` does not wait."""
    logged: bool = False
    """Whether the step's metrics are logged: the first step, the last one and every ``metrics.log_freq``-th; the same on
    every rank. If the data ends early, the last step is logged when that is known, after its report."""


@dataclass(frozen=True)
class ValidationReport:
    """The result of one validation; the same on every rank."""

    step: int
    """The last step before the validation."""
    loss: float
    """Mean over the target tokens."""
    num_targets: int
    """Number of target tokens."""
    num_batches: int
    """Number of global batches."""
    seconds: float
    """Duration of the validation."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the objective, as in :class:`StepReport`."""
    name: str = ""
    """What was validated, if not the weights of the step: ``"averaged"`` (:attr:`Run.validate`)."""
    dataset: str = ""
    """One of several datasets (``validation.sets``); empty: all of them, or the only one."""


@dataclass(frozen=True)
class RunEnd:
    """How a run ended, and what it left. The result of :func:`titan_core.train`."""

    step: int
    """The last step taken."""
    completed: bool
    """Whether the run reached the last step that the config requests."""
    reason: str
    """The reason, in words."""
    error: BaseException | None = None
    """The exception that ended the run, which may be a KeyboardInterrupt."""
    preempted: bool = False
    """Whether SIGTERM, SIGHUP, SIGQUIT or SIGXCPU ended the run, after a complete step; the job should be restarted."""
    interrupted: bool = False
    """Whether a person interrupted the run (Ctrl-C), after a complete step."""
    data_ended: bool = False
    """Whether the data ended before the last step."""
    restarts: bool = False
    """Whether the run starts again in the same processes (:attr:`Run.restart`)."""
    loss: float | None = None
    """Loss of the last step; ``None`` if this attempt took no step, or failed."""
    validation_loss: float | None = None
    """Loss of the last validation; ``None`` if this attempt measured none, or failed."""
    checkpoint: str | None = None
    """Path of the checkpoint of the last step; ``None`` if there is none."""
    dump_folder: str = ""
    """The run's directory."""

    @property
    def failed(self) -> bool:
        """Whether an exception ended the run."""
        return self.error is not None


@dataclass(frozen=True)
class NextCommand:
    """A command that the user of a run may want next."""

    purpose: str
    """A few words: ``"continue a prompt"``."""
    arguments: tuple[str, ...]
    """The arguments of ``titan``, one string each, not quoted. Paths are relative to the working directory of the run."""


Record = Mapping[str, float | int | None]
"""``step`` and metrics by name, for one logged step or one validation (which has ``validation_loss``, or
``validation_loss/NAME``, but no ``loss``).
``None``: the value is unknown or not finite."""
