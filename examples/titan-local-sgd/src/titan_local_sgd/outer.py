"""The outer optimizer (Douillard et al., "DiLoCo", arXiv 2311.08105, algorithm 1)."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_core.api import ModelPart, Run, StepReport, TrainingContext, hookimpl
from titan_local_sgd.config import LocalSGDSection


class OuterOptimizer:
    """Synchronises the islands every ``local_sgd.sync_every`` steps and after the last step."""

    def __init__(self, parts: Sequence[ModelPart], context: TrainingContext[LocalSGDSection]) -> None:
        self._section = context.section
        self._group = context.mesh["island"].get_group()
        self._steps = context.job.steps
        named = [pair for part in parts for pair in part.named_parameters()]
        self._names = [name for name, _ in named]
        self._weights = [parameter.detach() for _, parameter in named]
        self._common = [weight.clone() for weight in self._weights]
        momentum = self._section.outer_momentum
        self._sgd = torch.optim.SGD(self._common, lr=self._section.outer_lr, momentum=momentum, nesterov=momentum > 0)
        if momentum:  # created now, so that a checkpoint can be loaded into it
            for common in self._common:
                self._sgd.state[common]["momentum_buffer"] = torch.zeros_like(common)
        self._begun = torch.zeros(())

    @hookimpl
    def titan_state_tensors(self) -> dict[str, Tensor]:
        """Return the outer state. Its tensors are divided like the weights, so they can be loaded on another mesh."""
        tensors = {"local_sgd.begun": self._begun}
        for name, common in zip(self._names, self._common, strict=True):
            tensors[f"local_sgd.common.{name}"] = common
            if common in self._sgd.state:
                tensors[f"local_sgd.momentum.{name}"] = self._sgd.state[common]["momentum_buffer"]
        return tensors

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        # No outer state was restored, but the weights may have been loaded after this object was built.
        if not self._begun:
            for common, weight in zip(self._common, self._weights, strict=True):
                common.copy_(weight)
            self._begun.fill_(1)

    @hookimpl
    @torch.no_grad()
    def titan_step_end(self, report: StepReport) -> None:
        if report.step % self._section.sync_every and report.step != self._steps:
            return
        for common, weight in zip(self._common, self._weights, strict=True):
            common.grad = common - weight
            dist.all_reduce(_local(common.grad), dist.ReduceOp.AVG, group=self._group)
        self._sgd.step()
        for common, weight in zip(self._common, self._weights, strict=True):
            weight.copy_(common)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
