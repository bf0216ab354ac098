"""Initial values of parameters, each a function of (seed, fully qualified name, global element index) alone.

Each element has its own random 32-bit word, ``philox(index // 4)[index % 4]`` under a key derived from seed and name, and
its value is a function of that word. Any shard of a parameter can therefore be filled separately, on any mesh, and all
shards together equal the whole parameter bit for bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from titan_core.api import Constant, InitialValue, Normal, TruncatedNormal, Uniform
from titan_core.model.philox import philox

_CHUNK = 1 << 20
"""Number of elements filled at a time; bounds the generator's temporary memory to about 100 MB."""


def fill(
    local: Tensor, value: InitialValue, *, seed: int, name: str, global_shape: Sequence[int], offset: Sequence[int]
) -> None:
    """Fill ``local``, a contiguous tensor with the box of parameter ``name`` that begins at ``offset``.

    Args:
        local: this rank's shard, or the whole parameter if it is not sharded.
        global_shape: shape of the whole parameter.
        offset: global index of ``local``'s first element, one number per dimension.
    """
    if isinstance(value, Constant):
        local.fill_(value.value)
        return
    if local.numel() == 0:
        return
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")
    run = _run_length(local.shape, global_shape)
    rows = local.view(-1, run)
    starts = _run_starts(local.shape, global_shape, offset, run, local.device)
    # Chunks over rows and within a row: a one-dimensional parameter is a single row, however long.
    rows_at_once = max(1, _CHUNK // run)
    for top in range(0, rows.shape[0], rows_at_once):
        some = starts[top : top + rows_at_once]
        for left in range(0, run, _CHUNK):
            width = min(_CHUNK, run - left)
            words = _words(some + left, width, key)
            rows[top : top + rows_at_once, left : left + width] = _to_values(words, value)


def _run_length(shape: Sequence[int], global_shape: Sequence[int]) -> int:
    """Return how many contiguous elements of the shard are contiguous in the global tensor too."""
    run = 1
    for size, global_size in zip(reversed(shape), reversed(global_shape), strict=True):
        run *= size
        if size != global_size:
            break
    return run


def _run_starts(
    shape: Sequence[int], global_shape: Sequence[int], offset: Sequence[int], run: int, device: torch.device
) -> Tensor:
    """Return the global index of the first element of each run of the shard, int64 ``[runs]``."""
    starts = torch.zeros(1, dtype=torch.int64, device=device)
    stride = 1
    covered = 1  # local elements of the dimensions seen so far, from the innermost
    for size, global_size, first in zip(reversed(shape), reversed(global_shape), reversed(offset), strict=True):
        if covered >= run:
            index = (torch.arange(size, dtype=torch.int64, device=device) + first) * stride
            starts = (index[:, None] + starts[None, :]).flatten()
        else:
            starts = starts + first * stride
        covered *= size
        stride *= global_size
    return starts


def _words(starts: Tensor, width: int, key: int) -> Tensor:
    """Return the random words of ``width`` elements from each of ``starts``, int64 ``[len(starts), width]``."""
    counters = (starts // 4)[:, None] + torch.arange((width + 6) // 4, device=starts.device)
    words = philox(counters, key).flatten(1)
    skipped = starts % 4
    if bool((skipped == skipped[0]).all()):
        first = int(skipped[0])
        return words[:, first : first + width]
    return words.gather(1, skipped[:, None] + torch.arange(width, device=starts.device))


def _to_values(words: Tensor, value: InitialValue) -> Tensor:
    """Map random words to fp32 values of the distribution ``value``, by its inverse cumulative distribution function."""
    # The upper 23 bits and one half: symmetric, never 0 or 1, and exact in fp32.
    centred = (2.0 * (words >> 9).float() + (1.0 - 2.0**23)) * 2.0**-23  # in (-1, 1)
    match value:
        case Uniform(low, high):
            return low + (high - low) * (0.5 * centred + 0.5)
        case Normal(std):
            return torch.erfinv(centred) * (math.sqrt(2.0) * std)
        case TruncatedNormal(std, limit):
            return torch.erfinv(centred * math.erf(limit / math.sqrt(2.0))) * (math.sqrt(2.0) * std)
        case _:
            raise TypeError(f"not a random initial value: {value!r}")
