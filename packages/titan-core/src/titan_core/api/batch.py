"""Batches: the data of one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace

import torch
from torch import Tensor

IGNORE = -100
"""Target of a position without a loss (the convention of ``F.cross_entropy``)."""


@dataclass(frozen=True)
class Extra:
    """A tensor that a plugin adds to a batch. Its first dimension is the batch."""

    tensor: Tensor
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
    rows: Tensor | None = None
    """Index of each sequence in the step's global batch, int64, ``[batch]``."""
    columns: Tensor | None = None
    """Index of each position in its sequence, int64, ``[batch, seq]``; ``None``: ``0 .. seq - 1``."""
    extras: Mapping[str, Extra] = field(default_factory=dict)
    """Tensors that plugins add, by name. A model receives those in its layout's ``inputs``; an objective receives all."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with ``function`` applied to every tensor."""

        def apply(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else function(tensor)

        return Batch(
            function(self.tokens),
            function(self.targets),
            weights=apply(self.weights),
            positions=apply(self.positions),
            documents=apply(self.documents),
            rows=apply(self.rows),
            columns=apply(self.columns),
            extras={name: replace(extra, tensor=function(extra.tensor)) for name, extra in self.extras.items()},
        )

    def map_sequence(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with ``function``, which selects positions, applied to every tensor whose second dimension is the
        sequence. ``documents`` still covers the whole sequence."""
        return replace(
            self,
            tokens=function(self.tokens),
            targets=function(self.targets),
            weights=None if self.weights is None else function(self.weights),
            positions=None if self.positions is None else function(self.positions),
            columns=None if self.columns is None else function(self.columns),
            extras={
                name: replace(extra, tensor=function(extra.tensor)) if extra.sequence else extra
                for name, extra in self.extras.items()
            },
        )

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


def join_batches(batches: list[Batch]) -> Batch:
    """Return one batch with the sequences of all ``batches``, which must have the same tensors."""
    first = batches[0]

    def joined(tensors: list[Tensor | None]) -> Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(present) if present else None

    return Batch(
        torch.cat([batch.tokens for batch in batches]),
        torch.cat([batch.targets for batch in batches]),
        weights=joined([batch.weights for batch in batches]),
        positions=joined([batch.positions for batch in batches]),
        documents=joined([batch.documents for batch in batches]),
        rows=joined([batch.rows for batch in batches]),
        columns=joined([batch.columns for batch in batches]),
        extras={
            name: replace(extra, tensor=torch.cat([batch.extras[name].tensor for batch in batches]))
            for name, extra in first.extras.items()
        },
    )


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
