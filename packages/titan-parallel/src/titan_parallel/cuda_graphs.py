"""CUDA graphs: the forward and backward passes of a step, recorded once and then launched at once.

The graph is that of the whole step: all microbatches, and the collectives of FSDP, tensor and context parallelism. A graph
repeats kernels with the addresses and numbers that they had when it was recorded. Tensors of a batch are therefore copied
into those of the recording, and numbers that differ between steps, the weight of the targets and the key of random draws,
are tensors. What a step leaves, gradients and sums, is in memory that only the graph uses. The gradient norm, clipping, the
update and all observers run as they do without graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_core.api import Batch, ModelPart, Run, RunEnd, Slot, StepInput, StepRunner, TrainingContext, UserError, hookimpl
from titan_core.api.parallel.microbatch import AuxiliaryLosses, MetricSums, key_of_step
from titan_core.toolkit.simulation import has_values
from titan_parallel.config import CudaGraphKeys

log = logging.getLogger(__name__)

WARM_UP = 2
"""Steps before the one that is recorded: they compile, make communicators and fill caches, which a recording must not. As
TorchTitan's, the second one follows an update."""
KEY = "training.disable_cuda_graphs"

_STEP: Slot[GraphedStep] = Slot(name="titan_parallel.graphed_step", summary="the step runner, for its observer")


def make_step(runner: StepRunner, parts: Sequence[ModelPart], context: TrainingContext[CudaGraphKeys]) -> StepRunner:
    """Return a runner that records what ``runner`` does, or ``runner`` on a CPU, which has no graphs."""
    if context.device.type != "cuda":
        log.info("%s = false has no effect: this job computes on the CPU", KEY)
        return runner
    step = GraphedStep(runner, parts)
    parts[0].fill(_STEP.name, "", step)
    return step


def observe(parts: Sequence[ModelPart], context: TrainingContext[CudaGraphKeys]) -> object:
    """Return what frees the graph when training ends."""
    return parts[0].entries(_STEP).get("", object())


class GraphedStep:
    """Runs the first steps with ``runner``, records one, and then repeats it. A step that differs from the recorded one, in
    the shapes of its batches or because gradients are to be added to others, runs without the graph."""

    def __init__(self, runner: StepRunner, parts: Sequence[ModelPart]) -> None:
        self._runner, self._parts = runner, parts
        self._parameters = [parameter for part in parts for parameter in part.module.parameters()]
        self._steps = 0
        self._recorded: RecordedStep | None = None
        self._reported = False

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Check that nothing is computed from the weights after each update, such as float8's scales: a new tensor each
        time, where a graph reads the first one.

        Raises:
            UserError: something is.
        """
        if any(part.weights_changed for part in self._parts):
            why = (
                "a transform computes something from the weights after each update, such as the scales of float8.precompute_"
                "float8_dynamic_scale_for_fsdp; it has another address each time, and a graph reads the first one"
            )
            raise UserError.one(f"{KEY} = false", why, f"set {KEY} = true, or switch that off")

    @hookimpl
    def titan_train_end(self, end: RunEnd) -> None:
        """Free the graph: NCCL cannot destroy communicators that a graph uses (pytorch/pytorch#115388)."""
        self._recorded = None

    def evaluate(self, inputs: StepInput) -> Tensor:
        """See :class:`~titan_core.api.StepRunner`. Evaluations are not recorded."""
        return self._runner.evaluate(inputs)

    def __call__(self, inputs: StepInput) -> Tensor:
        """See :class:`~titan_core.api.StepRunner`.

        Raises:
            UserError: the step cannot be recorded, or a tensor of the model has another address than it had then.
        """
        # A step that is repeated counts nothing, and the gradients of the first one must survive it.
        repeated = inputs.statistics is None
        if repeated or any(parameter.grad is not None for parameter in self._parameters):
            return self._runner(inputs)
        if not has_values():  # simulated devices have no graphs, and it counts the kernels of each step
            return self._runner(inputs)
        self._steps += 1
        if self._steps <= WARM_UP:
            return self._runner(inputs)
        if self._recorded is None:
            self._recorded = RecordedStep(self._runner, self._parts, inputs)
        if not self._recorded.fits(inputs):
            if not self._reported:
                log.warning("step %d is not a CUDA graph: its batches have other shapes than the recorded ones", inputs.step)
            self._reported = True
            return self._runner(inputs)
        return self._recorded.run(inputs)


class RecordedStep:
    """A step that can be repeated on other data."""

    def __init__(self, runner: StepRunner, parts: Sequence[ModelPart], inputs: StepInput) -> None:
        """Record what ``runner`` does with ``inputs``, without doing it.

        Raises:
            UserError: that is not possible.
        """
        assert inputs.auxiliary is not None and inputs.statistics is not None
        self._modules = [part.module for part in parts]
        self._shapes = _shapes(inputs.batches)
        device = inputs.batches[0].tokens.device
        self._auxiliary, self._metrics = AuxiliaryLosses(inputs.auxiliary.scale), MetricSums()
        self._statistics = inputs.statistics.empty()
        self._weight = torch.zeros((), device=device)
        self._key = torch.zeros((), dtype=torch.int64, device=device)
        self._batches = [batch.map(torch.clone) for batch in inputs.batches]
        self._tensors = list(_tensors(self._batches))
        static = replace(
            inputs, batches=self._batches, target_weight=self._weight, key=self._key,
            auxiliary=self._auxiliary, metrics=self._metrics, statistics=self._statistics,
        )  # fmt: skip
        try:
            self._loss, self._launch = record(lambda: runner(static))
        except RuntimeError as error:
            first = _first(error)
            why = f"step {inputs.step} cannot be recorded: {type(first).__name__}: {str(first).partition(chr(10))[0]}"
            fix = f"set {KEY} = true. `titan simulate` shows where the host waits for the device, which no graph can"
            raise UserError.one(f"{KEY} = false", why, fix) from error
        parameters = (parameter for module in self._modules for parameter in module.parameters())
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        self._addresses = list(_addresses(self._modules))
        log.info("step %d is recorded as a CUDA graph", inputs.step)

    def fits(self, inputs: StepInput) -> bool:
        """Whether the batches of ``inputs`` have the recorded shapes."""
        return _shapes(inputs.batches) == self._shapes

    @torch.no_grad()
    def run(self, inputs: StepInput) -> Tensor:
        """Repeat the step on ``inputs``. Gradients, losses and counts are those that the runner would leave.

        Raises:
            UserError: a parameter or buffer has another address than when the step was recorded.
        """
        assert inputs.auxiliary is not None and inputs.metrics is not None and inputs.statistics is not None
        for (name, now), (_, before) in zip(_addresses(self._modules), self._addresses, strict=True):
            if now != before:
                why = "has been replaced since the step was recorded, and a CUDA graph would use the former one"
                raise UserError.one(f"{name!r} of the model", why, f"change it in place, or set {KEY} = true")
        for static, tensor in zip(self._tensors, _tensors(inputs.batches), strict=True):
            static.copy_(tensor)
        self._weight.fill_(inputs.target_weight)
        self._key.fill_(key_of_step(inputs.seed, inputs.step))
        self._statistics.counts.zero_()
        self._launch()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        inputs.auxiliary.values.update(self._auxiliary.values)
        inputs.auxiliary.divided.update(self._auxiliary.divided)
        inputs.metrics.values.update(self._metrics.values)
        inputs.statistics.counts.add_(self._statistics.counts)
        return self._loss.clone()


def record(step: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
    """Record the kernels of ``step``. Return what it returned, and what launches them again; that fills the same tensors."""
    graph = torch.cuda.CUDAGraph()
    # Only this thread must not call what a recording forbids: others pin batches and write checkpoints.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        loss = step()
    return loss, graph.replay


def _first(error: BaseException) -> BaseException:
    """Return the error that invalidated a recording. Its end then fails as well."""
    return error if error.__context__ is None else _first(error.__context__)


def _tensors(batches: Iterable[Batch]) -> Iterator[Tensor]:
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    for batch in batches:
        batch.map(keep)
    return iter(found)


def _shapes(batches: Sequence[Batch]) -> object:
    """Return what a recording has fixed about ``batches``."""
    names = [sorted(batch.extras) for batch in batches]
    return names, [(tensor.shape, tensor.dtype) for tensor in _tensors(batches)]


def _addresses(modules: Iterable[nn.Module]) -> Iterator[tuple[str, int]]:
    for module in modules:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            yield name, (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data_ptr()
