"""Incremental decoding: attention keeps the keys and values of earlier positions, so that a new token computes one position.

Mixers take part by calling :func:`current_decoding`, as :class:`~titan_core.api.CausalAttention` does. Nothing
else of a model changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titan_core.api.model.dense_attention import attend_densely


class Decoding:
    """What each mixer keeps of the earlier positions of a batch of sequences: causal attention its keys and values, another
    mixer its own state. Titan makes it; a mixer finds it by :func:`current_decoding`, and reads and replaces its state::

        def forward(self, x: Tensor) -> Tensor:  # a running sum over positions
            decoding = current_decoding()
            if decoding is None:
                return x.cumsum(dim=1)
            kept = decoding.state(self)
            sums = x.masked_fill(~decoding.real[..., None], 0.0).cumsum(dim=1) + kept.get("sum", 0.0)
            kept["sum"] = sums[:, -1:]
            return sums

    The results must be those of the whole sequence. If any mixer of a model keeps nothing, each new token computes the whole
    sequence instead.

    Sequences of different lengths share a batch: positions behind the end of a short one hold padding, which no query sees
    and which later tokens overwrite.
    """

    def __init__(self, sequences: int, length: int) -> None:
        """
        Args:
            length: number of positions to allocate for each sequence.
        """
        self._sequences, self._length = sequences, length
        self._caches: dict[nn.Module, _Cache] = {}
        self._states: dict[nn.Module, dict[str, Tensor]] = {}
        self._positions: Tensor | None = None
        self._end = 0
        self._lengths: Tensor | None = None

    @property
    def mixers(self) -> frozenset[nn.Module]:
        """The mixers that keep keys and values, or a state, so far."""
        return frozenset(self._caches) | frozenset(self._states)

    @contextmanager
    def computing(self, positions: Tensor, end: int, lengths: Tensor | None = None) -> Iterator[None]:
        """Forward passes within the context compute ``positions``.

        Args:
            positions: ``[batch, seq]``, consecutive in each sequence. Earlier positions must have been computed before.
            end: one more than the largest of them.
            lengths: number of positions of each sequence, ``[batch]``; later ones are padding. ``None``: none is padding.
        """
        global _current
        self._positions, self._end, self._lengths = positions, end, lengths
        before, _current = _current, self
        try:
            yield
        finally:
            _current = before

    @property
    def real(self) -> Tensor:
        """Which of the positions being computed are not padding, boolean ``[batch, seq]``."""
        positions = self._current_positions()
        return torch.ones_like(positions, dtype=torch.bool) if self._lengths is None else positions < self._lengths[:, None]

    def state(self, mixer: nn.Module) -> dict[str, Tensor]:
        """Return the tensors that ``mixer`` keeps from one forward pass to the next, by names of its choice; empty at first.
        The mixer replaces them by those after the positions being computed, of which only the :attr:`real` ones count."""
        return self._states.setdefault(mixer, {})

    def attend(
        self,
        mixer: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        window: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of the positions being computed to all positions of their sequence up to themselves. Of a window,
        only the positions that it can still see are kept.

        Args:
            mixer: whose keys and values they are.
            q: ``[batch, heads, seq, head_dim]``.
            k: as ``q``, with as many heads or with fewer that divide them (grouped queries).
            v: as ``k``.
            window: see :class:`~titan_core.api.CausalAttention`, as for the following.
            softcap: cap of the scores.
            scale: factor of the scores.
            sinks: score of each head's sink, ``[heads]``.
        """
        positions = self._current_positions()
        if mixer not in self._caches:
            slots = self._length if window is None else min(window, self._length)
            self._caches[mixer] = _Cache(self._allocate(k, slots), self._allocate(v, slots))
        cache = self._caches[mixer]
        if window is None or window >= self._length:
            cache.write(positions, k, v)
            keys, values = (kept[:, : self._end].transpose(1, 2) for kept in (cache.keys, cache.values))
            seen = torch.arange(self._end, device=q.device) <= positions[:, None, :, None]
        else:
            held = cache.positions_before(positions[:, :1])
            places = torch.cat((held, positions), dim=1)
            keys = torch.cat((cache.keys.transpose(1, 2), k), dim=2)
            values = torch.cat((cache.values.transpose(1, 2), v), dim=2)
            distance = positions[:, :, None] - places[:, None, :]
            seen = ((distance >= 0) & (distance < window) & (places >= 0)[:, None])[:, None]
        mixed = attend_densely(q, keys, values, seen, softcap=softcap, scale=scale, sinks=sinks)
        if window is not None and window < self._length:
            cache.write_last(positions, self.real, k, v)
        return mixed

    def _current_positions(self) -> Tensor:
        assert self._positions is not None, "computing() says which positions these are"
        return self._positions

    def _allocate(self, like: Tensor, slots: int) -> Tensor:
        """``[batch, slots, heads, head_dim]``: new positions are written without a copy."""
        return like.new_zeros(self._sequences, slots, like.shape[1], like.shape[3])


@dataclass
class _Cache:
    """Keys and values, ``[batch, slots, heads, head_dim]``. Position ``p`` is in slot ``p % slots``."""

    keys: Tensor
    values: Tensor

    def write(self, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Keep those of ``positions``, ``[batch, seq]``, each in a slot of its own."""
        sequences = torch.arange(len(positions), device=k.device)[:, None]
        for kept, new in ((self.keys, k), (self.values, v)):
            kept[sequences, positions] = new.transpose(1, 2)

    def positions_before(self, first: Tensor) -> Tensor:
        """Return the position in each slot if those before ``first``, ``[batch, 1]``, have been written; negative in a slot
        that holds none."""
        slots = self.keys.shape[1]
        last = first - 1
        return last - (last - torch.arange(slots, device=first.device)) % slots

    def write_last(self, positions: Tensor, real: Tensor, k: Tensor, v: Tensor) -> None:
        """Keep the last of ``positions``, as many as there are slots, that are ``real``."""
        slots = self.keys.shape[1]
        ends = torch.where(real, positions, -1).amax(dim=1, keepdim=True)
        rows, columns = torch.nonzero(real & (positions > ends - slots), as_tuple=True)
        where = rows, positions[rows, columns] % slots
        for kept, new in ((self.keys, k), (self.values, v)):
            kept[where] = new.transpose(1, 2)[rows, columns]


_current: Decoding | None = None


def current_decoding() -> Decoding | None:
    """The decoding whose forward pass is running; ``None`` in training, and if tokens are generated without a cache."""
    return _current
