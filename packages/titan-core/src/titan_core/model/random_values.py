"""Initial values of parameters, each a function of (seed, fully qualified name, global element index) alone.

Each element has its own random 32-bit word, ``philox(index // 4)[index % 4]`` under a key derived from seed and name, and
its value is a function of that word. Any shard of a parameter can therefore be filled separately, on any mesh, and all
shards together equal the whole parameter bit for bit.

Philox4x32-10 (Salmon et al., SC'11) is a counter-based random generator: its n-th number is computed from n, without a
state. torch's generators do not suffice: on the CPU all shards of a DTensor get the same values, and torch's stateless
``torch.func._random`` is private and newer than the oldest torch that Titan supports.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from titan_core.api import Computed, Constant, Elements, InitialValue, Loaded, Normal, TruncatedNormal, Uniform, UserError
from titan_core.api.plugins.errors import shown

_CHUNK = 1 << 20
"""Number of elements filled at a time; bounds the generator's temporary memory to about 100 MB."""
_SAMPLE = 64
"""Number of elements of a shard that a plugin's function computes a second time, without the others."""
_ALONE = (
    "and so on the mesh: a rank may have one element alone. Compute each from its own index and random numbers, not from a "
    "statistic of all"
)


def fill(
    local: Tensor, value: InitialValue, *, seed: int, name: str, global_shape: Sequence[int], offset: Sequence[int]
) -> None:
    """Fill ``local``, a contiguous tensor with the box of parameter ``name`` that begins at ``offset``.

    Args:
        local: this rank's shard, or the whole parameter if it is not sharded.
        global_shape: shape of the whole parameter.
        offset: global index of ``local``'s first element, one number per dimension.

    Raises:
        UserError: the function of a :class:`~titan_core.api.Computed` value returned something unusable.
    """
    if isinstance(value, Constant):
        local.fill_(value.value)
        return
    if isinstance(value, Loaded):
        local.fill_(math.nan)  # until it is loaded
        return
    if local.numel() == 0:
        return
    run = _run_length(local.shape, global_shape)
    rows = local.view(-1, run)
    starts = _run_starts(local.shape, global_shape, offset, run, local.device)
    # Chunks over rows and within a row: a one-dimensional parameter is a single row, however long.
    rows_at_once = max(1, _CHUNK // run)
    values = (
        _ComputedValues(value, seed, name, global_shape) if isinstance(value, Computed) else _RandomValues(value, seed, name)
    )
    for top in range(0, rows.shape[0], rows_at_once):
        some = starts[top : top + rows_at_once]
        for left in range(0, run, _CHUNK):
            width = min(_CHUNK, run - left)
            rows[top : top + rows_at_once, left : left + width] = values(some + left, width)


class _RandomValues:
    """Computes the values of a distribution, ``[len(starts), width]``: ``width`` elements from each of ``starts``."""

    def __init__(self, value: Normal | TruncatedNormal | Uniform, seed: int, name: str) -> None:
        self._value, self._key = value, _key(f"{seed}:{name}")

    def __call__(self, starts: Tensor, width: int) -> Tensor:
        return _to_values(_words(starts, width, self._key), self._value)


class _ComputedValues:
    """Computes the values of a plugin's function, in the same form."""

    def __init__(self, value: Computed, seed: int, name: str, shape: Sequence[int]) -> None:
        self._value, self._seed, self._name, self._shape = value, seed, name, tuple(shape)
        self._function = value.values.load()
        self._sampled = False

    def __call__(self, starts: Tensor, width: int) -> Tensor:
        values = self._values(starts, width)
        if not self._sampled:  # once: the function is the same for all elements
            self._sampled = True
            self._require_independent(starts, values)
        return values

    def _values(self, starts: Tensor, width: int) -> Tensor:
        flat = (starts[:, None] + torch.arange(width, device=starts.device)).flatten()
        index = torch.unravel_index(flat, self._shape) if self._shape else ()
        found = self._function(Elements(self._shape, index, self._uniform(starts, width)), **self._value.arguments)
        if not isinstance(found, Tensor) or not found.is_floating_point():
            raise self._wrong(f"returned {shown(found)}; it must return a tensor of floating-point numbers")
        if not bool(torch.isfinite(found).all()):
            raise self._wrong("returned values that are not finite")
        if found.shape != flat.shape or found.device != flat.device:
            form = f"{list(found.shape)} on {found.device}"
            raise self._wrong(
                f"returned {form} for {len(flat)} elements on {flat.device}; it must return one value for each"
            )
        return found.view(len(starts), width)

    def _uniform(self, starts: Tensor, width: int) -> Callable[[], Tensor]:
        calls = 0

        def uniform() -> Tensor:
            nonlocal calls
            key = _key(f"{self._seed}:{self._name}" + (f":{calls}" if calls else ""))
            calls += 1
            return _to_values(_words(starts, width, key), Uniform(0.0, 1.0)).flatten()

        return uniform

    def _require_independent(self, starts: Tensor, values: Tensor) -> None:
        """Compute a few elements without the others.

        Raises:
            UserError: their values differ, so they would depend on the mesh.
        """
        try:
            alone = self._values(starts[-_SAMPLE:] + values.shape[1] - 1, 1)
        except UserError as error:
            few = len(starts[-_SAMPLE:])
            why = (
                f"computes {values.numel()} elements, and not {few} of them alone; it depends on which are computed together"
            )
            raise self._wrong(f"{why}, {_ALONE}") from error
        if not torch.allclose(alone[:, 0], values[-_SAMPLE:, -1], rtol=1e-5, atol=1e-7):
            raise self._wrong(f"returned values that depend on which elements are computed together, {_ALONE}")

    def _wrong(self, why: str) -> UserError:
        ref = self._value.values
        if ref.origin is not None:
            return ref.origin.failure(f"{ref.target} {why} (parameter {self._name!r})")
        return UserError.one(f"the initial value of parameter {self._name!r}", f"{ref.target} {why}", "fix the model plugin")


def _key(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


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


def _to_values(words: Tensor, value: Normal | TruncatedNormal | Uniform) -> Tensor:
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


_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF


def philox(counters: Tensor, key: int) -> Tensor:
    """Return four random 32-bit words per counter.

    Args:
        counters: int64, any shape; the lower 64 bits of the 128-bit counter (the upper bits are zero).
        key: 64-bit key.

    Returns:
        int64 ``[*counters.shape, 4]``, each in ``[0, 2**32)``.
    """
    zero = torch.zeros_like(counters)
    return torch.stack(philox_words((counters & _MASK, (counters >> 32) & _MASK, zero, zero), key), dim=-1)


def philox_words(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Apply the generator to a counter of four int64 tensors that contain 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(_ROUNDS):
        # The product of two 32-bit words fills 64 bits; int64 wraps around, and shift and mask still give both halves.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((product1 >> 32) & _MASK) ^ c1 ^ k0
        c1 = product1 & _MASK
        c2 = ((product0 >> 32) & _MASK) ^ c3 ^ k1
        c3 = product0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3
