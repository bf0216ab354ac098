"""The outer optimizer (Douillard et al., "DiLoCo", arXiv 2311.08105, algorithm 1)."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_core.hookspecs import hookimpl
from titan_core.model.part import ModelPart, TransformContext
from titan_core.train.events import RunStart, StepReport
from titan_local_sgd.config import LocalSGDSection


def apply(part: ModelPart, context: TransformContext) -> ModelPart:
    """The model stays as it is: islands differ in what their ranks do between steps."""
    return part


class OuterOptimizer:
    """Brings the islands together every so many steps."""

    def __init__(self, parts: Sequence[ModelPart], context: TransformContext) -> None:
        self._section = context.facts.section(LocalSGDSection)
        self._group = context.mesh["island"].get_group()
        self._steps = context.facts.config.value("training.steps")
        self._weights = [_local(parameter) for part in parts for parameter in part.module.parameters()]

    @hookimpl
    def titan_train_start(self, run: RunStart) -> None:
        self._common = [weight.clone() for weight in self._weights]
        self._sgd = torch.optim.SGD(
            self._common,
            lr=self._section.outer_lr,
            momentum=self._section.outer_momentum,
            nesterov=self._section.outer_momentum > 0,
        )

    @hookimpl
    @torch.no_grad()
    def titan_step_end(self, report: StepReport) -> None:
        if report.step % self._section.sync_every and report.step != self._steps:
            return
        for common, weight in zip(self._common, self._weights, strict=True):
            common.grad = common - weight
            dist.all_reduce(common.grad, dist.ReduceOp.AVG, group=self._group)
        self._sgd.step()
        for common, weight in zip(self._common, self._weights, strict=True):
            weight.copy_(common)


def _local(parameter: Tensor) -> Tensor:
    parameter = parameter.detach()
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
