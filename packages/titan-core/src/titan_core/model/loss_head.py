"""Computation of the loss within the model's last module, so that the logits of all positions never exist at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from titan_core.api.batch import Batch, with_positions
from titan_core.api.microbatch import Microbatch, current_microbatch, microbatch_scope
from titan_core.api.model_part import ModelPart
from titan_core.api.objective import ObjectiveFunction
from titan_core.api.step import is_shape_inference
from titan_core.api.vocabulary import Vocabulary

LARGEST_CHUNK = 2**30
"""Bytes of a chunk's fp32 logits if ``objective.chunk_tokens`` is 0."""


class LossHead:
    """Replaces the last module's ``forward``. Within :meth:`titan_core.api.model_part.ModelPart.computing` it returns the
    loss, summed over the weighted targets; otherwise it returns the logits.

    With more than one chunk, the backward pass recomputes the logits of each. The head then computes a third more matmuls,
    and keeps the logits of only one chunk in memory.
    """

    def __init__(self, part: ModelPart, forward: Callable[..., Tensor], chunk_tokens: int) -> None:
        """
        Args:
            forward: the module's original forward.
            chunk_tokens: positions per chunk, over all sequences of a microbatch.
        """
        self._part, self._forward, self._chunk_tokens = part, forward, chunk_tokens

    def __call__(self, hidden: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        """Return the loss or the logits of ``hidden``, ``[batch, seq, dim]``."""
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
        assert microbatch is not None, "computing() enters the current microbatch"
        if length >= seq:
            return self._loss(forward, hidden, microbatch)
        losses = []
        batch = with_positions(batch)  # random draws in the last module see only a chunk's columns
        for number, chunk in enumerate(hidden.split(length, dim=1)):
            first = number * length
            chunk_batch = batch.map_sequence(lambda tensor, first=first: tensor[:, first : first + length])  # type: ignore[misc]
            part = replace(microbatch, batch=chunk_batch)
            losses.append(checkpoint(self._loss, forward, chunk, part, use_reentrant=False))
        total: Tensor = sum(losses[1:], start=losses[0])
        return total

    def _loss(self, forward: Callable[..., Tensor], hidden: Tensor, microbatch: Microbatch) -> Tensor:
        with microbatch_scope(microbatch):
            logits = forward(hidden)
        return loss_of(self._part.objective, logits, microbatch.batch, self._part.vocabulary)


def loss_of(objective: ObjectiveFunction, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
    """Return the loss of ``logits``. Gathers logits sharded by tensor parallelism if the objective needs all columns."""
    if isinstance(logits, DTensor):
        if vocabulary.group is None:
            logits = logits.redistribute(placements=[Replicate()] * logits.device_mesh.ndim)
        logits = logits.to_local()
    return objective(logits, batch, vocabulary)


def attach(part: ModelPart, chunk_tokens: int) -> None:
    """Make the model's last module compute the loss, if ``part`` contains that module.

    Call this after all transforms, whose hooks remain around the module, and only for a model that returns the output of its
    last module.

    Args:
        chunk_tokens: ``objective.chunk_tokens``.
    """
    for module in part.present(part.layout.head[-1:]).values():
        tokens = chunk_tokens or max(1, LARGEST_CHUNK // (4 * part.layout.vocab_size))
        module.forward = LossHead(part, module.forward, tokens)
        part.loss_in_head = True
