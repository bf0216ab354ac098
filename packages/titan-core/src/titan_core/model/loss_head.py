"""Computation of the loss within the model's last module, so that the logits of all positions never exist at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from titan_core.api import Microbatch, ModelPart, Objective, ObjectiveFunction, TrainingContext, current_microbatch
from titan_core.api.parallel.microbatch import microbatch_scope
from titan_core.api.parallel.step import is_shape_inference
from titan_core.api.plugins.errors import shown
from titan_core.api.training.batch import with_positions
from titan_core.model.loss_gradients import Gradients, attach_gradients, gradients_of

LARGEST_CHUNK = 2**30
"""Bytes that the logits of a chunk would have in fp32 on each rank, if ``objective.chunk_tokens`` is 0. In bf16 they have
half as many, and so has their gradient. Smaller chunks would save little, because the head's weight and its gradient remain:
1 GiB each for 128,256 tokens and 4,096 features in bf16. Larger chunks would save little time: adding up the weight's
gradient takes 0.5 % of the head's time."""

LossOfChunk = Callable[[Tensor, Microbatch], Tensor]


class LossHead:
    """Replaces the last module's ``forward``. Within :meth:`titan_core.api.ModelPart.computing` it returns the
    loss, summed over the weighted targets; otherwise it returns the logits.

    With more than one chunk, the forward pass computes the gradients of each chunk as soon as its loss is known, so logits
    are neither kept nor computed again. The gradient of the module's weights is kept until the backward pass. One
    microbatch at a time does so; if a pipeline runs several forward passes first, the others recompute their logits.
    """

    def __init__(self, part: ModelPart, module: nn.Module, chunk_tokens: int) -> None:
        """
        Args:
            chunk_tokens: most positions per chunk, over all sequences of a microbatch.
        """
        self._part, self._module, self._chunk_tokens = part, module, chunk_tokens
        self._forward: Callable[..., Tensor] = module.forward
        self._pending: Callable[[], Gradients | None] = lambda: None

    def __call__(self, hidden: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        """Return the loss or the logits of ``hidden``, ``[batch, seq, dim]``."""
        forward = partial(self._forward, *arguments, **keywords) if arguments or keywords else self._forward
        if is_shape_inference():
            return hidden.float().sum() * 0.0
        if self._part.batch is None:
            return forward(hidden)
        microbatch = current_microbatch()
        assert microbatch is not None, "computing() enters the current microbatch"
        length = self._length(*hidden.shape[:2])
        loss_of_chunk = partial(self._loss, forward)
        if length == hidden.shape[1]:
            return loss_of_chunk(hidden, microbatch)
        return self._chunked(loss_of_chunk, hidden.split(length, dim=1), microbatch, hidden)

    def _length(self, sequences: int, seq: int) -> int:
        """Return the number of positions per chunk: equal in all chunks if possible, so that they compile only once."""
        if not self._part.objective.per_position:
            return seq
        return -(-seq // -(-seq // max(1, self._chunk_tokens // sequences)))

    def _chunked(
        self, loss_of_chunk: LossOfChunk, chunks: Sequence[Tensor], microbatch: Microbatch, hidden: Tensor
    ) -> Tensor:
        batch = with_positions(microbatch.batch)  # random draws in the last module see only a chunk's columns
        length = chunks[0].shape[1]
        microbatches = [
            replace(microbatch, batch=batch.map_sequence(lambda tensor, first=first: tensor[:, first : first + length]))  # type: ignore[misc]
            for first in range(0, hidden.shape[1], length)
        ]
        calls = list(zip(chunks, microbatches, strict=True))
        if not torch.is_grad_enabled():
            return _sum(loss_of_chunk(*call) for call in calls)
        pending = self._pending()
        if pending is None or not pending.of:
            parameters = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
            found = gradients_of(loss_of_chunk, calls, parameters, microbatch.target_weight)
            if found is not None:
                self._pending = weakref.ref(found)
                return attach_gradients(found, hidden, parameters)
        return _sum(checkpoint(loss_of_chunk, *call, use_reentrant=False) for call in calls)

    def _loss(self, forward: Callable[..., Tensor], hidden: Tensor, microbatch: Microbatch) -> Tensor:
        with microbatch_scope(microbatch):
            logits = forward(hidden)
        return self._part.loss_from(logits, microbatch.batch)


def _sum(losses: Iterable[Tensor]) -> Tensor:
    first, *others = losses
    return sum(others, start=first)


def build_objective(objective: Objective, context: TrainingContext[Any]) -> ObjectiveFunction:
    """Build the loss to minimise.

    Raises:
        UserError: it is no :class:`~titan_core.api.ObjectiveFunction`, or its metrics are no names.
    """
    made: ObjectiveFunction = objective.build.call(ObjectiveFunction, context)
    if not (isinstance(made.metrics, tuple) and all(isinstance(one, str) and one.isidentifier() for one in made.metrics)):
        raise objective.build.wrong(f"returned metrics = {shown(made.metrics)}; they must be a tuple of names")
    return made


def attach(part: ModelPart, chunk_tokens: int) -> None:
    """Make the model's last module compute the loss, if ``part`` contains that module.

    Call this after all transforms, whose hooks remain around the module, and only for a model that returns the output of its
    last module.

    Args:
        chunk_tokens: ``objective.chunk_tokens``.
    """
    for module in part.present(part.layout.head[-1:]).values():
        group = part.vocabulary.group
        columns = -(-part.layout.vocab_size // (1 if group is None else dist.get_world_size(group)))
        module.forward = LossHead(part, module, chunk_tokens or max(1, LARGEST_CHUNK // (4 * columns)))
        part.loss_in_head = True
