"""Random bits as a function of their place: step, row and column of the token, module, and feature index.

Each token has 64 bits from two rounds of SplitMix64 (Steele et al., OOPSLA 2014), computed once for all modules. Each
feature of a module has 32 bits, computed once for all tokens. An element mixes the bits of its token and its feature with
int32 operations that every device vectorises. There is no state, so any rank can compute any element at any time.
"""

from __future__ import annotations

import torch
from torch import Tensor

Words = tuple[Tensor, Tensor, Tensor]
"""int32: two random words per token, ``[tokens, 1]``, and one per feature, ``[features]``."""


def _signed(word: int, bits: int) -> int:
    return word - (1 << bits) if word >> (bits - 1) else word


_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9, 64), _signed(0x94D049BB133111EB, 64)
_MULTIPLIERS = _signed(0x7FEB352D, 32), _signed(0x846CA68B, 32), _signed(0x9E3779B1, 32)


def mixed(words: Tensor) -> Tensor:
    """Apply SplitMix64's bijection on int64. Each bit of the result depends on all bits of the argument."""
    words = (words ^ ((words >> 30) & ((1 << 34) - 1))) * _FIRST
    words = (words ^ ((words >> 27) & ((1 << 37) - 1))) * _SECOND
    return words ^ ((words >> 31) & ((1 << 33) - 1))


def token_words(key: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first two of :data:`Words`, before :func:`of_module`.

    Args:
        key: key of the step, int64 scalar.
        rows: int64 ``[batch]``.
        columns: int64 ``[batch, seq]`` or ``[seq]``.
    """
    words = mixed(mixed(key ^ rows)[:, None] ^ columns).view(-1, 1)
    return (words >> 32).to(torch.int32), words.to(torch.int32)


def of_module(key: Tensor, tokens: tuple[Tensor, Tensor], features: Tensor) -> Words:
    """Return all words of a module. Features of two modules draw different bits even if their words are equal.

    Args:
        key: key of the module, int64 scalar.
    """
    first, second = tokens
    return first, second + key.to(torch.int32), features


def feature_words(key: Tensor, first: int, count: int) -> Tensor:
    """Return the last of :data:`Words` for ``count`` features of a module, starting at ``first``.

    Args:
        key: key of the module, int64 scalar.
    """
    return mixed(key ^ torch.arange(first, first + count, device=key.device)).to(torch.int32)


def element_bits(words: Words) -> Tensor:
    """Return 31 random bits for each element, int32 ``[tokens, features]``."""
    first, second, features = words
    bits = (first ^ features) * _MULTIPLIERS[0]
    # An arithmetic shift merges each word with its complement; the addition separates them again.
    bits = ((bits ^ (bits >> 15)) + second) * _MULTIPLIERS[1]
    bits = (bits ^ ((bits >> 14) & 0x3FFFF)) * _MULTIPLIERS[2]
    return bits & 0x7FFFFFFF


def element_bits_into(bits: Tensor, scratch: Tensor, words: Words) -> None:
    """Write :func:`element_bits` to ``bits`` without allocating memory, for parts that fit into a cache.

    Args:
        scratch: a tensor like ``bits``, which is overwritten.
    """
    first, second, features = words
    torch.bitwise_xor(first, features, out=bits)
    bits.mul_(_MULTIPLIERS[0])
    torch.bitwise_right_shift(bits, 15, out=scratch)
    bits.bitwise_xor_(scratch).add_(second).mul_(_MULTIPLIERS[1])
    torch.bitwise_right_shift(bits, 14, out=scratch)
    bits.bitwise_xor_(scratch.bitwise_and_(0x3FFFF)).mul_(_MULTIPLIERS[2]).bitwise_and_(0x7FFFFFFF)
