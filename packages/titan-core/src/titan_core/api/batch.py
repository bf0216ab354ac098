"""What a model is fed with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

IGNORE = -100
"""Target of a position that is not trained on (the habit of ``F.cross_entropy``)."""


@dataclass(frozen=True)
class Batch:
    """One microbatch. All int64, ``[batch, seq]``."""

    tokens: Tensor
    targets: Tensor
    """The next token of each position, or :data:`IGNORE`."""
    positions: Tensor | None = None
    """The position of each token in its document; ``None`` means ``0 .. seq - 1``."""
    documents: Tensor | None = None
    """Of the *whole* sequence, whatever share of it the other tensors hold, the document of each position: attention stays
    inside of a document. ``None``: the sequence is one document."""

    def num_targets(self) -> int:
        """Positions that are trained on."""
        return int((self.targets != IGNORE).sum())

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """``function`` of each tensor that is there."""
        positions, documents = self.positions, self.documents
        return Batch(
            function(self.tokens),
            function(self.targets),
            None if positions is None else function(positions),
            None if documents is None else function(documents),
        )

    def split(self, size: int) -> list[Batch]:
        """Microbatches of ``size`` sequences."""
        starts = range(0, len(self.tokens), size)
        return [self.map(lambda tensor, start=start: tensor[start : start + size]) for start in starts]  # type: ignore[misc]

    def to(self, device: torch.device) -> Batch:
        """The batch on ``device``, copied without waiting where that is possible."""
        if device.type == "cpu":
            return self
        return self.map(lambda tensor: tensor.pin_memory().to(device, non_blocking=True))


def with_positions(batch: Batch) -> Batch:
    """The batch with its positions written out, for modules that see only some of the sequence."""
    if batch.positions is not None:
        return batch
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
    return replace(batch, positions=positions)
