"""What training minimises."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from titan_core.api.batch import Batch
from titan_core.api.vocabulary import Vocabulary


class ObjectiveFunction(ABC):
    """The loss of logits, as an :class:`~titan_core.api.components.Objective` builds it.

    The trainer divides by the weight of the targets of the global batch, so that ranks, microbatches and pipeline stages
    only ever add up. Where a model's last module returns its logits, the loss is computed within that module, a chunk of
    the positions at a time, so that the logits of all positions never exist (``objective.chunk_tokens``).
    """

    vocabulary_sharded: bool = True
    """Whether it computes with this rank's columns of the logits alone, by :class:`~titan_core.api.vocabulary.Vocabulary`.
    Where not, tensor parallelism gathers the logits, or refuses."""
    per_position: bool = True
    """Whether the loss of all positions is the sum of the losses of any chunks of them. Where not, it is given all
    positions at once, and context parallelism refuses it."""

    @abstractmethod
    def __call__(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
        """The loss, summed over the weighted targets; a scalar, in fp32.

        Args:
            logits: ``[batch, seq, columns of the vocabulary]``.
            batch: what they were computed for; of a chunk, those of its positions (``documents`` remain whole).
            vocabulary: which columns there are.
        """
