"""What a model is trained on in one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace

import torch
from torch import Tensor

IGNORE = -100
"""Target of a position that is not trained on (the convention of ``F.cross_entropy``)."""


@dataclass(frozen=True)
class Extra:
    """A tensor that a plugin adds to a batch. Its first dimension is the batch."""

    tensor: Tensor
    sequence: bool
    """Whether its second dimension is the sequence: context parallelism then divides it, as it divides the tokens."""


@dataclass(frozen=True)
class Batch:
    """One microbatch."""

    tokens: Tensor
    """int64, ``[batch, seq]``."""
    targets: Tensor
    """The next token of each position, or :data:`IGNORE`; int64, ``[batch, seq]``."""
    _: KW_ONLY
    weights: Tensor | None = None
    """How much each target counts, fp32, ``[batch, seq]``; ``None``: each target counts 1. The weight of a position whose
    target is :data:`IGNORE` is not used."""
    positions: Tensor | None = None
    """The position of each token in its document, int64, ``[batch, seq]``; ``None``: ``0 .. seq - 1``."""
    documents: Tensor | None = None
    """The document of each position of the *whole* sequence, however the other tensors are divided: attention stays within
    a document. int64, ``[batch, whole seq]``; ``None``: each sequence is one document."""
    rows: Tensor | None = None
    """The index of each sequence in the global batch of the step, int64, ``[batch]``."""
    columns: Tensor | None = None
    """The index of each position in its sequence, int64, ``[batch, seq]``; ``None``: ``0 .. seq - 1``."""
    extras: Mapping[str, Extra] = field(default_factory=dict)
    """What plugins add, by name. A model receives those that its layout lists in ``inputs``; an objective sees all."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Apply ``function`` to every tensor."""

        def of(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else function(tensor)

        return Batch(
            function(self.tokens),
            function(self.targets),
            weights=of(self.weights),
            positions=of(self.positions),
            documents=of(self.documents),
            rows=of(self.rows),
            columns=of(self.columns),
            extras={name: replace(extra, tensor=function(extra.tensor)) for name, extra in self.extras.items()},
        )

    def map_sequence(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Apply ``function``, which takes some of the positions, to every tensor whose second dimension is the sequence;
        ``documents`` remain those of the whole sequence."""
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
        """Microbatches of ``size`` sequences."""
        starts = range(0, len(self.tokens), size)
        return [self.map(lambda tensor, start=start: tensor[start : start + size]) for start in starts]  # type: ignore[misc]

    def to(self, device: torch.device) -> Batch:
        """The batch on ``device``, copied without waiting where that is possible."""
        if device.type == "cpu":
            return self
        return self.map(lambda tensor: tensor.pin_memory().to(device, non_blocking=True))

    def target_weights(self) -> Tensor:
        """The weight of each target, 0 where there is none; fp32, ``[batch, seq]``."""
        trained = self.targets != IGNORE
        return trained.float() if self.weights is None else torch.where(trained, self.weights, 0.0)


def join(batches: list[Batch]) -> Batch:
    """One batch of the sequences of all ``batches``, which have the same tensors."""
    first = batches[0]

    def all_of(tensors: list[Tensor | None]) -> Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(present) if present else None

    return Batch(
        torch.cat([one.tokens for one in batches]),
        torch.cat([one.targets for one in batches]),
        weights=all_of([one.weights for one in batches]),
        positions=all_of([one.positions for one in batches]),
        documents=all_of([one.documents for one in batches]),
        rows=all_of([one.rows for one in batches]),
        columns=all_of([one.columns for one in batches]),
        extras={
            name: replace(extra, tensor=torch.cat([one.extras[name].tensor for one in batches]))
            for name, extra in first.extras.items()
        },
    )


def with_positions(batch: Batch) -> Batch:
    """The batch with its positions and columns written out, for modules that see only some of the sequence."""
    if batch.positions is not None and batch.columns is not None:
        return batch
    order = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
    return replace(
        batch,
        positions=order if batch.positions is None else batch.positions,
        columns=order if batch.columns is None else batch.columns,
    )
