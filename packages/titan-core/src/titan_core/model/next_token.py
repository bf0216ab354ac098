"""The language-modelling objective: predict the next token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_core.api import Batch, ObjectiveFunction, TrainingContext, Vocabulary
from titan_core.api.training.batch import IGNORE


class NextToken(ObjectiveFunction):
    """Cross entropy in nats, summed over the weighted targets."""

    def __call__(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
        """See :class:`~titan_core.api.ObjectiveFunction`."""
        if vocabulary.group is None and logits.dtype == torch.float32 and batch.weights is None:
            # torch's kernel is faster, and fp32 logits need no conversion.
            return F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten(), ignore_index=IGNORE, reduction="sum")
        likelihood, _ = vocabulary.log_likelihood(logits, batch.targets)
        if batch.weights is not None:
            likelihood = likelihood * batch.weights
        return -torch.where(batch.targets != IGNORE, likelihood, 0.0).sum()


def build(context: TrainingContext[None]) -> NextToken:
    """Build the objective."""
    return NextToken()
