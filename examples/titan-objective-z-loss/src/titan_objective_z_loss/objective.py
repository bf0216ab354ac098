"""Cross entropy with z-loss (Chowdhery et al., "PaLM", arXiv 2204.02311, section 5)."""

import torch
from torch import Tensor

from titan_core.api import Batch, ObjectiveFunction, TrainingContext, Vocabulary, add_metric
from titan_objective_z_loss.config import ZLossSection


class NextTokenWithZLoss(ObjectiveFunction):
    """Negative log-likelihood of the next token, plus ``coefficient`` times the squared logarithm of the normaliser.
    Reports the mean square as ``objective/normaliser``."""

    metrics = ("normaliser",)

    def __init__(self, context: TrainingContext[ZLossSection]) -> None:
        self._coefficient = context.section.coefficient

    def __call__(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
        """See :class:`~titan_core.api.ObjectiveFunction`."""
        likelihood, normaliser = vocabulary.log_likelihood(logits, batch.targets)
        squares, weights = normaliser.square(), batch.target_weights()
        loss = torch.where(weights > 0, (self._coefficient * squares - likelihood) * weights, 0.0).sum()
        return add_metric(loss, "normaliser", squares, weights)
