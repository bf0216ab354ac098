"""Batches: the data of one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

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


_ALONG_SEQUENCE = ("tokens", "targets", "weights", "positions", "columns")
"""Tensors whose second dimension is the sequence, or this rank's share of it."""
_OTHERS = ("documents", "rows")


def join_batches(batches: list[Batch]) -> Batch:
    """Return one batch with the sequences of all ``batches``, which must have the same tensors."""
    names = [name for name in _ALONG_SEQUENCE + _OTHERS if getattr(batches[0], name) is not None]
    tensors: dict[str, Any] = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in names}
    extras = {
        name: replace(extra, tensor=torch.cat([batch.extras[name].tensor for batch in batches]))
        for name, extra in batches[0].extras.items()
    }
    return replace(batches[0], **tensors, extras=extras)


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
