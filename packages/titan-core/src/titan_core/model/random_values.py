"""First values of parameters: a function of (seed, fully qualified name, global element index) alone.

Each element has a random 32-bit word of its own, ``philox(index // 4)[index % 4]`` under a key made from seed and name,
and its value is a function of that word. So any shard of a parameter can be filled by itself, on any mesh, and the
shards together are bit for bit the whole.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from titan_core.api.initial_values import Constant, InitialValue, Normal, TruncatedNormal, Uniform
from titan_core.model.philox import philox

_CHUNK = 1 << 20
"""Elements filled at a time; bounds the generator's temporary memory to some 100 MB."""


def fill(
    local: Tensor, value: InitialValue, *, seed: int, name: str, global_shape: Sequence[int], offset: Sequence[int]
) -> None:
    """Fill ``local``, a contiguous tensor that holds the box of the parameter ``name`` beginning at ``offset``.

    Args:
        local: this rank's shard; the whole parameter where it is not sharded.
        global_shape: shape of the whole parameter.
        offset: index of ``local``'s first element in it, one number a dimension.
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
    # Chunks over rows, and over a long row: a one-dimensional view of billions of elements is one row.
    rows_at_once = max(1, _CHUNK // run)
    for top in range(0, rows.shape[0], rows_at_once):
        some = starts[top : top + rows_at_once]
        for left in range(0, run, _CHUNK):
            width = min(_CHUNK, run - left)
            words = _words(some + left, width, key)
            rows[top : top + rows_at_once, left : left + width] = _to_values(words, value)


def _run_length(shape: Sequence[int], global_shape: Sequence[int]) -> int:
    """How many elements of the shard lie side by side in the global tensor too."""
    run = 1
    for size, global_size in zip(reversed(shape), reversed(global_shape), strict=True):
        run *= size
        if size != global_size:
            break
    return run


def _run_starts(
    shape: Sequence[int], global_shape: Sequence[int], offset: Sequence[int], run: int, device: torch.device
) -> Tensor:
    """Global index of the first element of each run of the shard, int64 ``[runs]``."""
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
    """The random words of ``width`` elements from each of ``starts``: int64 ``[len(starts), width]``."""
    counters = (starts // 4)[:, None] + torch.arange((width + 6) // 4, device=starts.device)
    words = philox(counters, key).flatten(1)
    skipped = starts % 4
    if bool((skipped == skipped[0]).all()):
        first = int(skipped[0])
        return words[:, first : first + width]
    return words.gather(1, skipped[:, None] + torch.arange(width, device=starts.device))


def _to_values(words: Tensor, value: InitialValue) -> Tensor:
    """Random words to fp32 values of the distribution that ``value`` names, by its inverse cumulative distribution."""
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
