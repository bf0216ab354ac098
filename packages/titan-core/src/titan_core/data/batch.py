"""What a model is fed with."""

from __future__ import annotations

from dataclasses import dataclass

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

    def num_targets(self) -> int:
        """Positions that are trained on."""
        return int((self.targets != IGNORE).sum())

    def to(self, device: torch.device) -> Batch:
        """The batch on ``device``, copied without waiting where that is possible."""
        if device.type == "cpu":
            return self
        positions = None if self.positions is None else _copy(self.positions, device)
        return Batch(_copy(self.tokens, device), _copy(self.targets, device), positions)


def with_positions(batch: Batch) -> Batch:
    """The batch with its positions written out, for modules that see only some of the sequence."""
    if batch.positions is not None:
        return batch
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
    return Batch(batch.tokens, batch.targets, positions)


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True)
