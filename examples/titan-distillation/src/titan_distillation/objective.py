"""Distillation (Hinton et al., arXiv 1503.02531, section 2)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from titan_core.api import Batch, ObjectiveFunction, TrainingContext, Vocabulary, add_metric
from titan_distillation.config import DistillationSection


class Distillation(ObjectiveFunction):
    """The teacher's divergence ``KL(teacher || student)`` at a temperature, times its square, and the cross entropy of the
    next token. Reports both as ``objective/divergence`` and ``objective/cross_entropy``."""

    metrics = ("divergence", "cross_entropy")

    def __init__(self, context: TrainingContext[DistillationSection]) -> None:
        self._temperature, self._share = context.section.temperature, context.section.share

    def of_reference(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Mapping[str, Tensor]:
        """Return the teacher's logits: this rank's columns."""
        return {"teacher": logits}

    def __call__(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
        """See :class:`~titan_core.api.ObjectiveFunction`."""
        weights, temperature = batch.target_weights(), self._temperature
        likelihood, _ = vocabulary.log_likelihood(logits, batch.targets)
        student, teacher = logits.float() / temperature, batch.extras["teacher"].tensor.float() / temperature
        _, of_student = vocabulary.log_likelihood(student, batch.targets)
        _, of_teacher = vocabulary.log_likelihood(teacher, batch.targets)
        probabilities = (teacher - of_teacher[..., None]).exp()
        # Probabilities sum to 1 over the columns of all ranks, so the normalisers need no sum.
        divergence = vocabulary.sum(probabilities * (teacher - student)) - of_teacher + of_student
        losses = self._share * temperature**2 * divergence - (1.0 - self._share) * likelihood
        loss = torch.where(weights > 0, losses * weights, 0.0).sum()
        loss = add_metric(loss, "divergence", divergence, weights)
        return add_metric(loss, "cross_entropy", -likelihood, weights)
