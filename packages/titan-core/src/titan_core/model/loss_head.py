"""The loss, computed within a model's last module, so that the logits of all positions never exist at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from titan_core.api.batch import Batch, with_positions
from titan_core.api.microbatch import Microbatch, current_microbatch, entered
from titan_core.api.model_part import ModelPart
from titan_core.api.objective import ObjectiveFunction
from titan_core.api.step import is_shape_inference
from titan_core.api.vocabulary import Vocabulary

LARGEST_CHUNK = 2**30
"""Bytes of the fp32 logits of a chunk, where ``objective.chunk_tokens`` is 0."""


class LossHead:
    """Stands in the place of the last module's ``forward``. Within :meth:`titan_core.api.model_part.ModelPart.computing`
    it returns the loss, summed over the weighted targets; otherwise the logits.

    With more than one chunk, the logits of each are computed a second time in the backward pass instead of being kept: a
    third of the head's matrix products more, for all but a chunk of their memory.
    """

    def __init__(self, part: ModelPart, forward: Callable[..., Tensor], chunk_tokens: int) -> None:
        """
        Args:
            forward: the module's own.
            chunk_tokens: positions of a chunk, over all sequences of a microbatch.
        """
        self._part, self._forward, self._chunk_tokens = part, forward, chunk_tokens

    def __call__(self, hidden: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        """``hidden`` is ``[batch, seq, dim]``."""
        forward = partial(self._forward, *arguments, **keywords) if arguments or keywords else self._forward
        if is_shape_inference():
            local = hidden.to_local() if isinstance(hidden, DTensor) else hidden
            return local.float().sum() * 0.0
        batch = self._part.batch
        if batch is None:
            return forward(hidden)
        sequences, seq = hidden.shape[:2]
        length = max(1, self._chunk_tokens // sequences) if self._part.objective.per_position else seq
        microbatch = current_microbatch()
        assert microbatch is not None, "computing() enters the microbatch whose loss is computed"
        if length >= seq:
            return self._loss(forward, hidden, microbatch)
        losses = []
        batch = with_positions(batch)  # what draws in the last module sees some of the columns
        for number, chunk in enumerate(hidden.split(length, dim=1)):
            first = number * length
            those = batch.map_sequence(lambda tensor, first=first: tensor[:, first : first + length])  # type: ignore[misc]
            part = replace(microbatch, batch=those)
            losses.append(checkpoint(self._loss, forward, chunk, part, use_reentrant=False))
        total: Tensor = sum(losses[1:], start=losses[0])
        return total

    def _loss(self, forward: Callable[..., Tensor], hidden: Tensor, microbatch: Microbatch) -> Tensor:
        with entered(microbatch):
            logits = forward(hidden)
        return loss_of(self._part.objective, logits, microbatch.batch, self._part.vocabulary)


def loss_of(objective: ObjectiveFunction, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
    """The loss of logits; those that tensor parallelism has divided are gathered where the objective wants all columns."""
    if isinstance(logits, DTensor):
        if vocabulary.group is None:
            logits = logits.redistribute(placements=[Replicate()] * logits.device_mesh.ndim)
        logits = logits.to_local()
    return objective(logits, batch, vocabulary)


def attach(part: ModelPart, chunk_tokens: int) -> None:
    """Compute the loss of ``part`` in its last module, if ``part`` has it. Called after all transforms, whose hooks remain
    around the module, and for models alone that return what this module returns.

    Args:
        chunk_tokens: ``objective.chunk_tokens``.
    """
    for module in part.present(part.layout.head[-1:]).values():
        chosen = chunk_tokens or max(1, LARGEST_CHUNK // (4 * part.layout.vocab_size))
        module.forward = LossHead(part, module.forward, chosen)
        part.loss_in_head = True
