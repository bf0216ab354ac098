"""Direct preference optimization (Rafailov et al., arXiv 2305.18290, equation 7)."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_core.api import Batch, ObjectiveFunction, TrainingContext, Vocabulary, add_metric
from titan_dpo.config import DPOSection


class DPO(ObjectiveFunction):
    """Minus the log-likelihood that the chosen answer is preferred, a mean over pairs. Reports the mean difference of the
    rewards of a pair, ``objective/margin``, and in how many pairs it is positive, ``objective/accuracy``."""

    per_position, per_document = False, True
    metrics = ("margin", "accuracy")

    def __init__(self, context: TrainingContext[DPOSection]) -> None:
        self._beta = context.section.beta

    def of_reference(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Mapping[str, Tensor]:
        """Return the log-likelihoods of the targets under the reference policy."""
        return {"reference": vocabulary.log_likelihood(logits, batch.targets)[0]}

    def __call__(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
        """See :class:`~titan_core.api.ObjectiveFunction`."""
        likelihood, _ = vocabulary.log_likelihood(logits, batch.targets)
        weights, side = batch.target_weights(), batch.extras["preference"].tensor
        ratio = torch.where(weights > 0, likelihood - batch.extras["reference"].tensor, 0.0)
        # The two answers of a pair are documents 2 k and 2 k + 1 of their sequence.
        documents = batch.sum_documents(torch.stack((ratio * side, weights * side.abs()), dim=-1))
        pairs = F.pad(documents, (0, 0, 0, documents.shape[1] % 2)).unflatten(1, (-1, 2)).sum(2)
        margin, weight = self._beta * pairs[..., 0], pairs[..., 1]
        loss = -(weight * F.logsigmoid(margin)).sum()
        loss = add_metric(loss, "margin", margin, weight)
        return add_metric(loss, "accuracy", margin > 0, weight)
