"""Incremental decoding: attention keeps the keys and values of earlier positions, so that a new token computes one position.

Mixers take part by calling :func:`current_decoding`, as :class:`~titan_core.api.CausalAttention` does. Nothing
else of a model changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Decoding:
    """The keys and values of a batch of sequences, for each mixer that has computed them.

    A sequence's position is also its slot in the cache, so sequences of different lengths share a batch: positions behind
    the end of a short one hold padding, which no query sees and which later tokens overwrite.
    """

    def __init__(self, sequences: int, length: int) -> None:
        """
        Args:
            length: number of positions to allocate for each sequence.
        """
        self._sequences, self._length = sequences, length
        self._caches: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._positions: Tensor | None = None
        self._end = 0

    @property
    def mixers(self) -> frozenset[nn.Module]:
        """The mixers that have cached keys and values so far."""
        return frozenset(self._caches)

    @contextmanager
    def computing(self, positions: Tensor, end: int) -> Iterator[None]:
        """Forward passes within the context compute ``positions``.

        Args:
            positions: ``[batch, seq]``. Earlier positions of each sequence must have been computed before, or be among them.
            end: one more than the largest of them.
        """
        global _current
        self._positions, self._end = positions, end
        before, _current = _current, self
        try:
            yield
        finally:
            _current = before

    def attend(self, mixer: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of the positions being computed to all positions of their sequence up to themselves.

        Args:
            mixer: whose keys and values they are.
            q: ``[batch, heads, seq, head_dim]``.
            k: as ``q``, with as many heads or with fewer that divide them (grouped queries).
            v: as ``k``.
        """
        positions = self._positions
        assert positions is not None, "computing() says which positions these are"
        if mixer not in self._caches:
            self._caches[mixer] = (self._allocate(k), self._allocate(v))
        sequences = torch.arange(self._sequences, device=q.device)[:, None]
        for cache, new in zip(self._caches[mixer], (k, v), strict=True):
            cache[sequences, positions] = new.transpose(1, 2)
        keys, values = (cache[:, : self._end].transpose(1, 2) for cache in self._caches[mixer])
        seen = torch.arange(self._end, device=q.device) <= positions[:, None, :, None]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=q.shape[1] != k.shape[1])

    def _allocate(self, like: Tensor) -> Tensor:
        """``[batch, length, heads, head_dim]``: new positions are written without a copy."""
        return like.new_zeros(self._sequences, self._length, like.shape[1], like.shape[3])


_current: Decoding | None = None


def current_decoding() -> Decoding | None:
    """The decoding whose forward pass is running; ``None`` in training, and if tokens are generated without a cache."""
    return _current
