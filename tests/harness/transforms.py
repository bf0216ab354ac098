"""Transforms as a third party may write them, by names that a Ref can have."""

from __future__ import annotations

import torch
from torch import Tensor

from titan_core.api.build_context import TrainingContext
from titan_core.api.components import Phase, Transform
from titan_core.api.loss import cross_entropy_sum
from titan_core.api.model_part import ModelPart
from titan_core.api.ref import Ref


def smoothed(logits: Tensor, targets: Tensor) -> Tensor:
    """A loss that is not the core's."""
    return cross_entropy_sum(logits, targets) + 1e-3 * logits.float().square().sum()


def own_loss(part: ModelPart, context: TrainingContext[None]) -> ModelPart:
    part.loss = smoothed
    return part


def other_loss(part: ModelPart, context: TrainingContext[None]) -> ModelPart:
    part.loss = lambda logits, targets: cross_entropy_sum(logits, targets)
    return part


def wrapped_loss(part: ModelPart, context: TrainingContext[None]) -> ModelPart:
    part.wrap_loss(lambda loss: lambda logits, targets: loss(logits, targets) * 1.0)
    return part


def offloaded(part: ModelPart, context: TrainingContext[None]) -> ModelPart:
    part.parameters_on = torch.device("cpu")
    return part


def elsewhere(part: ModelPart, context: TrainingContext[None]) -> ModelPart:
    part.parameters_on = torch.device("meta")
    return part


def batches(part: ModelPart, context: TrainingContext[None]) -> ModelPart:
    part.batch_transforms += (lambda batch: batch,)
    return part


def only_my_batches(part: ModelPart, context: TrainingContext[None]) -> ModelPart:
    part.batch_transforms = (lambda batch: batch,)
    return part


def evaluation(part: ModelPart, context: TrainingContext[None]) -> ModelPart:
    part.after_evaluation += (lambda: None,)
    return part


def accounts(part: ModelPart, context: TrainingContext[None]) -> ModelPart:
    part.add_flops(torch.float16, 2.0)
    return part


def no_accounts(part: ModelPart, context: TrainingContext[None]) -> ModelPart:
    part.flops = {}
    return part


def casts(part: ModelPart, context: TrainingContext[None]) -> ModelPart:
    part.casts["blocks.0"] = lambda tensor: tensor
    return part


def bare(part: ModelPart, context: TrainingContext[None]) -> list[ModelPart]:
    """A part of its own, with the module and the layout alone."""
    return [ModelPart(part.module, part.layout, part.loss)]


def transform(function: str, phase: Phase = Phase.PRECISION) -> Transform:
    """The transform that is ``function``."""
    return Transform(
        name=function, summary="", phase=phase, active=lambda context: True, apply=Ref(f"harness.transforms:{function}")
    )
