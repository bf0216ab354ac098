"""Transforms that a third party might write, as module-level functions that a Ref can name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from titan_core.api import Batch, ModelPart, ObjectiveFunction, Phase, Ref, Slot, TrainingContext, Transform, Vocabulary
from titan_core.model.next_token import NextToken

NOTES: Slot[str] = Slot(name="tests.notes", summary="")
CASTS: Slot[Callable[[Tensor], Tensor]] = Slot(name="tests.casts", summary="")


class Smoothed(ObjectiveFunction):
    """An objective that wraps another one."""

    def __init__(self, objective: ObjectiveFunction, vocabulary_sharded: bool = True) -> None:
        self._objective, self.vocabulary_sharded = objective, vocabulary_sharded

    def __call__(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
        return self._objective(logits, batch, vocabulary) + 1e-3 * vocabulary.sum(logits.float().square()).sum()


def other_loss(part: ModelPart, context: TrainingContext[None]) -> ModelPart:
    part.objective = NextToken()
    return part


def wrapped_loss(part: ModelPart, context: TrainingContext[None]) -> ModelPart:
    part.wrap_objective(Smoothed)
    return part


def whole_vocabulary(part: ModelPart, context: TrainingContext[None]) -> ModelPart:
    part.wrap_objective(lambda objective: Smoothed(objective, vocabulary_sharded=False))
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
    part.fill(NOTES.name, "blocks.0", "noted")
    return part


def no_accounts(part: ModelPart, context: TrainingContext[None]) -> ModelPart:
    part.slots = {}
    return part


def casts(part: ModelPart, context: TrainingContext[None]) -> ModelPart:
    part.fill(CASTS.name, "blocks.0", lambda tensor: tensor)
    return part


def saves_silu(part: ModelPart, context: TrainingContext[None]) -> ModelPart:
    part.saved_operators += (torch.ops.aten.silu.default,)
    return part


def policies(part: ModelPart, context: TrainingContext[None]) -> ModelPart:
    """Blocks 1 and 3 save what SiLU returns, and decide nothing else."""
    for name in list(part.blocks())[1::2]:
        part.fill(
            "titan_parallel.save_policies",
            name,
            lambda operator, number: True if operator is torch.ops.aten.silu.default else None,
        )
    return part


def flops_in_float8(part: ModelPart, context: TrainingContext[None]) -> ModelPart:
    part.fill("titan_debug.flops", "blocks.0", (torch.float8_e4m3fn, 6.0))
    return part


def unknown_slot(part: ModelPart, context: TrainingContext[None]) -> ModelPart:
    part.fill("titan_debug.flops".removesuffix("s"), "blocks.0", 1.0)
    return part


def wrong_value(part: ModelPart, context: TrainingContext[None]) -> ModelPart:
    part.fill("titan_debug.flops", "blocks.0", 1.0)
    return part


def misplaced_policy(part: ModelPart, context: TrainingContext[None]) -> ModelPart:
    part.fill("titan_parallel.save_policies", "tok_embeddings", lambda operator, number: None)
    return part


def bare(part: ModelPart, context: TrainingContext[None]) -> list[ModelPart]:
    """Return a new part with only the module, the layout and the objective."""
    return [ModelPart(part.module, part.layout, part.objective)]


def transform(function: str, phase: Phase = Phase.PRECISION) -> Transform:
    """Return a transform that applies ``function``."""
    return Transform(
        name=function, summary="", phase=phase, active=lambda context: True, apply=Ref(f"harness.transforms:{function}")
    )
