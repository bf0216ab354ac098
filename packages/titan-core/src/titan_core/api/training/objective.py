"""Objectives, which training minimises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from titan_core.api.training.batch import Batch
from titan_core.api.training.vocabulary import Vocabulary


class ObjectiveFunction(ABC):
    """Computes the loss from logits. Built by an :class:`~titan_core.api.Objective` component.

    The trainer divides by the total target weight of the global batch, so the results of ranks, microbatches and pipeline
    stages are added up. If the model's last module returns its logits, the loss is computed inside that module, in chunks of
    positions, so that the logits of all positions never exist at once (``objective.chunk_tokens``).
    """

    vocabulary_sharded: bool = True
    """Whether it can compute with this rank's columns of the logits only, by means of
    :class:`~titan_core.api.Vocabulary`. If not, tensor parallelism gathers the logits or refuses the
    objective."""
    per_position: bool = True
    """Whether the loss of all positions is the sum of the losses of any chunks of them. If not, it receives all positions at
    once, and context parallelism refuses it unless it is :attr:`per_document`."""
    per_document: bool = False
    """Whether the loss is a sum over sequences of a function of sums over documents, which it computes with
    :meth:`Batch.sum_documents <titan_core.api.Batch.sum_documents>`. Context parallelism then gives each rank some of the
    positions, and the ranks compute the same loss from the sums."""

    metrics: tuple[str, ...] = ()
    """Names of the metrics that it reports with :func:`~titan_core.api.add_metric`."""

    @abstractmethod
    def __call__(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
        """Return the loss, summed over the weighted targets; an fp32 scalar.

        Args:
            logits: ``[batch, seq, columns of the vocabulary]``.
            batch: the batch of the logits; for a chunk, only its positions (except ``documents``, which stays complete).
            vocabulary: the columns that the logits have.
        """

    def of_reference(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Mapping[str, Tensor]:
        """Return what is needed of the reference model's logits (:attr:`titan_core.api.Objective.reference`), by name:
        tensors ``[batch, seq, ...]``. The batch of :meth:`__call__` has them as :class:`~titan_core.api.Extra` tensors.

        They are kept for all microbatches of a step: log-likelihoods are smaller than logits. The arguments are those of
        :meth:`__call__`; called for chunks of positions, without gradients.
        """
        raise NotImplementedError  # called only for an objective that declares a reference model
