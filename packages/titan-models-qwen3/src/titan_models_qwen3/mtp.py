"""The loss of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2, equations 21 to 25)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_core.api import (
    Batch,
    Extra,
    ModelPart,
    ObjectiveFunction,
    TrainingContext,
    UserError,
    Vocabulary,
    add_metric,
)
from titan_core.api.training.batch import IGNORE
from titan_models_qwen3.model import Qwen3
from titan_models_qwen3.mtp_config import TARGETS, TOKENS, WEIGHTS, MTPKeys


def apply(part: ModelPart, context: TrainingContext[MTPKeys]) -> ModelPart:
    """Add the loss to the part's objective, and what it needs to its batches.

    Raises:
        UserError: the objective is no sum over positions, or sequences are too short.
    """
    assert isinstance(part.module, Qwen3)  # whose layout names these inputs
    depths, seq_len = part.module.depths, context.job.batch.seq_len
    if depths >= seq_len:
        why = f"is {depths}, and sequences of {seq_len} tokens (training.seq_len) have no token so far ahead"
        raise UserError.one("model.args.n_mtp_layers", why, f"lower it to {seq_len - 1} or less")
    if not part.objective.per_position:
        why = "needs all positions of a document together, and multi-token prediction adds a loss of each"
        raise UserError.one("objective.name", why, "set model.args.n_mtp_layers = 0")
    part.batch_transforms += (partial(with_later_tokens, depths=depths),)
    part.wrap_objective(partial(MultiTokenPrediction, weight=context.section.mtp_weight))
    return part


def with_later_tokens(batch: Batch, depths: int) -> Batch:
    """Return a batch of whole sequences with the tokens after each position, and the targets of each depth.

    The target of depth ``k`` is the next token's target ``k`` positions later, with its weight. A position has none if that
    would be beyond its sequence or its document.
    """
    weights = batch.target_weights()
    found = [_later(batch, weights, depth) for depth in range(1, depths + 1)]
    stacked = (torch.stack(tensors, dim=-1) for tensors in zip(*found, strict=True))
    extras = {name: Extra(tensor, sequence=True) for name, tensor in zip((TOKENS, TARGETS, WEIGHTS), stacked, strict=True)}
    return replace(batch, extras={**batch.extras, **extras})


def _later(batch: Batch, weights: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    def later(tensor: Tensor, fill: int) -> Tensor:
        kept = tensor[:, depth:]
        return F.pad(kept, (0, tensor.shape[1] - kept.shape[1]), value=fill)

    targets, shifted = later(batch.targets, IGNORE), later(weights, 0)
    if batch.documents is not None:
        same = later(batch.documents, -1) == batch.documents
        targets, shifted = torch.where(same, targets, IGNORE), torch.where(same, shifted, 0.0)
    return later(batch.tokens, 0), targets, shifted


class MultiTokenPrediction(ObjectiveFunction):
    """The loss of another objective, and in training a weighted mean of the cross entropies of all depths. These are divided
    by what that loss is divided by: the weight of the next token's targets.

    Reports the loss of the other objective as ``objective/main_loss`` and the mean cross entropy of the predicted tokens as
    ``objective/mtp_loss``. An evaluation has the loss of the other objective, and both metrics.
    """

    metrics = ("main_loss", "mtp_loss")

    def __init__(self, objective: ObjectiveFunction, weight: float) -> None:
        """
        Args:
            weight: factor of the mean over depths.
        """
        self.vocabulary_sharded = objective.vocabulary_sharded
        self._objective, self._weight = objective, weight

    def __call__(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
        """See :class:`~titan_core.api.ObjectiveFunction`; logits are those of the model, then those of each depth."""
        targets, weights = (batch.extras[name].tensor for name in (TARGETS, WEIGHTS))
        main, *later = logits.chunk(1 + targets.shape[-1])
        loss = self._objective(main, batch, vocabulary)
        total = batch.target_weights().sum()
        loss = add_metric(loss, "main_loss", loss / total, total)
        for depth, one in enumerate(later):
            likelihood, _ = vocabulary.log_likelihood(one, targets[..., depth])
            weight = weights[..., depth]
            term = torch.where(weight > 0, likelihood * weight, 0.0).sum()
            term = add_metric(term, "mtp_loss", -likelihood, weight)
            if torch.is_grad_enabled():
                loss = loss - self._weight / len(later) * term
        return loss
