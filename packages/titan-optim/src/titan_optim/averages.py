"""Averages of the weights of successive steps, beside the weights that are trained.

An average of weights has about the loss that decaying the learning rate would give, at any time (Izmailov et al., "Averaging
weights leads to wider optima", arXiv 1803.05407; Hägele et al., "Scaling laws and compute-optimal training beyond fixed
training durations", arXiv 2405.18392).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_core.api import Job, ModelPart, Run, StepReport, TrainingContext, ValidationReport, hookimpl, matches
from titan_core.api.config.sections import TrainingSection
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_optim.config import AVERAGED, AveragesSection

if TYPE_CHECKING:
    from titan_optim.averages_on_host import HostAverages

PREFIX = "averaged_weights"
"""Prefix of the averages' names in checkpoints: ``averaged_weights.PARAMETER``."""
STATES = f"{PREFIX}.states"


class AveragedWeights:
    """Averages what training changes: parameters that some stage of the run trains, and persistent floating-point buffers,
    such as the biases that balance experts. An average has the shards of its tensor, in fp32 if the tensor's type is
    narrower."""

    def __init__(self, parts: Sequence[ModelPart], context: TrainingContext[AveragesSection]) -> None:
        self._section, self._parts = context.section, parts
        self._tensors = dict(named for part in parts for named in averaged_tensors(part, context.job))
        self._host: HostAverages | None = None
        if context.section.enable_cpu_offload:
            from titan_optim.averages_on_host import HostAverages

            self._host = HostAverages(context.device)
        # A weight's average means nothing before the first state, whose weight is 1.
        self._averages = {name: self._zeros_like(tensor.detach()) for name, tensor in self._tensors.items()}
        self._states = torch.zeros((), dtype=torch.int64, device=context.device)
        self._run: Run | None = None

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Remember the run, to validate averages."""
        self._run = run

    @hookimpl
    def titan_state_tensors(self) -> dict[str, Tensor]:
        """Return the averages, complete, and how many states are in them."""
        if self._host is not None:
            self._host.finish()
        named = {f"{PREFIX}.{name}": average for name, average in self._averages.items()}
        return {**named, STATES: self._states}

    @hookimpl
    def titan_before_update(self) -> None:
        """Let averages on the host be taken from weights that have not changed."""
        if self._host is not None:
            self._host.before_change()

    @hookimpl(trylast=True)  # after observers that change buffers
    @torch.no_grad()
    def titan_step_end(self, report: StepReport) -> None:
        """Take the weights into their averages if that is due and the step updated them, without a wait for the device."""
        after = report.step - self._section.start_step
        if report.skipped is True or after < 0 or after % self._section.freq:
            return
        taken = torch.as_tensor(~report.skipped if isinstance(report.skipped, Tensor) else True, device=self._states.device)
        self._states += taken
        weight = taken * self._weight_of_newest()
        if self._host is not None:
            self._host.take(self._pairs(), weight)
            return
        for name, tensor in self._tensors.items():
            average, newest = _local(self._averages[name]), _local(tensor.detach())
            average.lerp_(newest.to(average.dtype), weight.to(average.device, average.dtype))

    @hookimpl(trylast=True)  # the live weights' loss is logged first
    def titan_validation_end(self, report: ValidationReport) -> None:
        """Validate the averages too."""
        if report.name or report.dataset or not self._section.validate_averages or not self._states.item():
            return
        assert self._run is not None
        with self._averages_in_the_model():
            self._run.validate(AVERAGED)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each average and the newest value: a copy of a buffer, which the next forward pass may change."""
        for name, tensor in self._tensors.items():
            newest = _local(tensor.detach())
            yield _local(self._averages[name]), newest if isinstance(tensor, nn.Parameter) else newest.clone()

    def _weight_of_newest(self) -> Tensor:
        """Return the weight of the newest state in the averages, 0-d fp64."""
        states = self._states.double()
        if self._section.kind == "mean":
            return 1 / states.clamp(min=1)
        return torch.where(states > 1, 1 - self._section.decay, 1.0)

    @contextmanager
    def _averages_in_the_model(self) -> Iterator[None]:
        """Give the model its averaged weights inside the context. Meanwhile each rank holds a copy of its shards, where the
        averages are."""
        if self._host is not None:
            self._host.before_change()
        copy = torch.clone if self._host is None else self._host.copy
        kept = {name: copy(_local(tensor.detach())) for name, tensor in self._tensors.items()}
        self._replace({name: _local(average) for name, average in self._averages.items()})
        try:
            yield
        finally:
            self._replace(kept)

    def _zeros_like(self, tensor: Tensor) -> Tensor:
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        return torch.zeros_like(tensor, dtype=dtype) if self._host is None else self._host.zeros_like(tensor, dtype)

    @torch.no_grad()
    def _replace(self, values: dict[str, Tensor]) -> None:
        for name, tensor in self._tensors.items():
            _local(tensor.detach()).copy_(values[name], non_blocking=True)
        for part in self._parts:
            for recompute in part.weights_changed:
                recompute()


def averaged_tensors(part: ModelPart, job: Job) -> Iterator[tuple[str, Tensor]]:
    """Yield what is averaged of a part by fully qualified name; a shared parameter once. The same in all stages of a run."""
    now = job.section(TrainingSection).freeze
    stages = job.stages if isinstance(job, AssembledJob) else ()
    others = [stage.config.section(TrainingSection).freeze for stage in stages]
    for name, parameter in part.named_parameters():
        thaws = matches(name, now) and not all(matches(name, patterns) for patterns in others)
        if parameter.requires_grad or thaws:
            yield name, parameter
    kept = part.module.state_dict().keys()
    yield from ((name, one) for name, one in part.module.named_buffers() if name in kept and one.is_floating_point())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
