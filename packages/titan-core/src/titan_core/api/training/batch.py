"""Batches, the data of one forward pass, and objectives, which training minimises on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_core.api.training.vocabulary import Vocabulary

IGNORE = -100
"""Target of a position without a loss (the convention of ``F.cross_entropy``)."""


@dataclass(frozen=True)
class Extra:
    """A tensor that a plugin adds to a batch. Its first dimension is the batch."""

    tensor: Tensor
    """``[batch, ...]``, or ``[batch, seq, ...]``."""
    sequence: bool
    """Whether its second dimension is the sequence. If so, context parallelism shards it along with the tokens."""


@dataclass(frozen=True)
class Batch:
    """One microbatch."""

    tokens: Tensor
    """int64, ``[batch, seq]``."""
    targets: Tensor
    """The next token of each position, or :data:`IGNORE`; int64, ``[batch, seq]``."""
    _: KW_ONLY
    weights: Tensor | None = None
    """Weight of each target in the loss, fp32, ``[batch, seq]``; ``None``: 1 each. The weight of a position whose target is
    :data:`IGNORE` is ignored."""
    positions: Tensor | None = None
    """Position of each token in its document, int64, ``[batch, seq]``; ``None``: ``0 .. seq - 1``."""
    documents: Tensor | None = None
    """Document of each position of the *whole* sequence, even if the other tensors are sharded; attention stays within a
    document. int64, ``[batch, whole seq]``; ``None``: each sequence is one document."""
    document_ends: Tensor | None = None
    """End of each document in its sequence, int32 ``[batch, documents]``, filled up with the sequence's; ``None``: attention
    within documents takes :attr:`documents` instead (``data.document_attention``)."""
    longest_document: int = 0
    """At least the length of the longest document, if there are :attr:`document_ends`. The host needs the number."""
    rows: Tensor | None = None
    """Index of each sequence in the step's global batch, int64, ``[batch]``."""
    columns: Tensor | None = None
    """Index of each position in its sequence, int64, ``[batch, seq]``; ``None``: ``0 .. seq - 1``."""
    sequence_group: dist.ProcessGroup | None = None
    """The ranks that share the sequences of this batch; ``None``: this rank has all positions."""
    extras: Mapping[str, Extra] = field(default_factory=dict)
    """Tensors that plugins add, by name. A model receives those in its layout's ``inputs``; an objective receives all."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with ``function`` applied to every tensor."""
        return self._replaced(_ALONG_SEQUENCE + _OTHERS, self.extras, function)

    def map_sequence(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with ``function``, which selects positions, applied to every tensor whose second dimension is the
        sequence. ``documents`` still covers the whole sequence."""
        extras = {name: extra for name, extra in self.extras.items() if extra.sequence}
        return self._replaced(_ALONG_SEQUENCE, extras, function)

    def _replaced(self, names: Iterable[str], extras: Mapping[str, Extra], function: Callable[[Tensor], Tensor]) -> Batch:
        tensors: dict[str, Any] = {name: function(tensor) for name in names if (tensor := getattr(self, name)) is not None}
        changed = {name: replace(extra, tensor=function(extra.tensor)) for name, extra in extras.items()}
        return replace(self, **tensors, extras={**self.extras, **changed})

    def split(self, size: int) -> list[Batch]:
        """Return microbatches of ``size`` sequences."""
        starts = range(0, len(self.tokens), size)
        return [self.map(lambda tensor, start=start: tensor[start : start + size]) for start in starts]  # type: ignore[misc]

    def to(self, device: torch.device) -> Batch:
        """Return the batch on ``device``; copies do not block if possible."""
        if device.type == "cpu":
            return self
        return self.map(lambda tensor: tensor.pin_memory().to(device, non_blocking=True))

    def target_weights(self) -> Tensor:
        """Return the weight of each target, 0 where it is :data:`IGNORE`; fp32, ``[batch, seq]``."""
        trained = self.targets != IGNORE
        return trained.float() if self.weights is None else torch.where(trained, self.weights, 0.0)

    def sum_documents(self, values: Tensor) -> Tensor:
        """Sum ``values`` over the positions of each document, on all ranks that share the sequences.

        Args:
            values: ``[batch, seq, ...]``.

        Returns:
            ``[batch, documents, ...]``, the same on these ranks. Entry ``d`` of a sequence is its document ``d``. There are
            as many entries as the whole sequence has positions, with 0 for documents that it does not have; one entry
            without :attr:`documents`.
        """
        if self.documents is None:
            sums = values.sum(1, keepdim=True)
        else:
            own = self.documents if self.columns is None else self.documents.gather(1, self.columns)
            sums = values.new_zeros(*self.documents.shape, *values.shape[2:])
            sums = sums.scatter_add(1, own[(...,) + (None,) * (values.dim() - 2)].expand_as(values), values)
        return sums if self.sequence_group is None else _SumOverRanks.apply(sums, self.sequence_group)


class _SumOverRanks(torch.autograd.Function):
    """Each rank returns its share of the loss that it computes from the sum, so gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, total = group, values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


_ALONG_SEQUENCE = ("tokens", "targets", "weights", "positions", "columns")
"""Tensors whose second dimension is the sequence, or this rank's share of it."""
_OTHERS = ("documents", "document_ends", "rows")


def join_batches(batches: list[Batch]) -> Batch:
    """Return one batch with the sequences of all ``batches``, which must have the same tensors."""
    names = [name for name in _ALONG_SEQUENCE + _OTHERS if getattr(batches[0], name) is not None]
    if batches[0].document_ends is not None:
        batches = _with_equal_ends(batches)
    tensors: dict[str, Any] = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in names}
    extras = {
        name: replace(extra, tensor=torch.cat([batch.extras[name].tensor for batch in batches]))
        for name, extra in batches[0].extras.items()
    }
    return replace(batches[0], **tensors, extras=extras)


def _with_equal_ends(batches: list[Batch]) -> list[Batch]:
    """Return the batches with as many entries in :attr:`Batch.document_ends` as the one with most."""
    found = [batch.document_ends for batch in batches if batch.document_ends is not None]
    count, longest = max(ends.shape[1] for ends in found), max(batch.longest_document for batch in batches)
    filled = [torch.cat((ends, ends[:, -1:].expand(-1, count - ends.shape[1])), 1) for ends in found]
    pairs = zip(batches, filled, strict=True)
    return [replace(batch, document_ends=ends, longest_document=longest) for batch, ends in pairs]


def with_positions(batch: Batch) -> Batch:
    """Return the batch with explicit positions and columns, for modules that receive only a part of each sequence."""
    if batch.positions is not None and batch.columns is not None:
        return batch
    order = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
    return replace(
        batch,
        positions=order if batch.positions is None else batch.positions,
        columns=order if batch.columns is None else batch.columns,
    )


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
        raise NotImplementedError  # optional: called only for an objective that declares a reference model
