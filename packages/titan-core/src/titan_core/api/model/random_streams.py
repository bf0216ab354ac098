"""Randomness inside a model that does not depend on the mesh, on recomputation, or on when a run resumes.

Modules that draw random numbers derive from :class:`RandomStream`. The draw of an element depends only on the seed, the
step, the module's fully qualified name, and the element's place in the global batch: sequence number, position and feature.
The core names the modules when it builds a model; :mod:`titan_core.api.parallel.microbatch` provides the place.

Each token has 64 bits from two rounds of SplitMix64 (Steele et al., OOPSLA 2014), computed once for all modules. Each
feature of a module has 32 bits, computed once for all tokens. An element mixes the bits of its token and its feature with
int32 operations that every device vectorises. There is no state, so any rank can compute any element at any time.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from titan_core.api.parallel.microbatch import Microbatch, current_microbatch
from titan_core.api.parallel.step import is_shape_inference
from titan_core.api.plugins.errors import UserError


class RandomStream(nn.Module):
    """Base class of modules that draw once per forward pass of the model, for tensors ``[batch, seq, features...]``.

    If the core has not named the module, the model is called outside a run: elements have no place in a global batch, and
    :meth:`words` returns ``None``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._name: str | None = None
        self._key: Tensor | None = None
        self._features: int | None = None
        self._rank, self._ranks = 0, 1
        self._derived: dict[tuple[int, int], Tensor] = {}  # feature words, by first feature and number of features

    def begin(self, name: str, device: torch.device) -> None:
        """Set the module's fully qualified name and its device. The core calls this when the model is built."""
        self._name = name
        digest = hashlib.sha256(name.encode()).digest()
        # A tensor rather than a number, so that one compiled graph serves all blocks; not a buffer, because it is not state.
        self._key = torch.full((), int.from_bytes(digest[:8], "little", signed=True), dtype=torch.int64, device=device)

    def expect(self, features: int) -> None:
        """Set the number of elements per token that the module sees. The core calls this before the model is sharded."""
        self._features = features

    def divide(self, rank: int, ranks: int) -> None:
        """Declare that each of ``ranks`` holds an equal, contiguous share of the positions or of the features that the
        module sees. A parallelism calls this; tensor shapes then show whether positions, features or neither are sharded.

        Raises:
            ValueError: the module is already sharded.
        """
        if self._ranks > 1:
            raise ValueError(f"module {self._name!r} of the model is already sharded")
        self._rank, self._ranks = rank, ranks

    def words(self, like: Tensor) -> Words | None:
        """Return the random words of the tokens and features of ``like``, ``[batch, seq, features...]``; ``None`` outside a
        run.

        Raises:
            UserError: ``like`` has an unexpected shape, or its microbatch is unknown.
        """
        microbatch = current_microbatch()
        if self._key is None and microbatch is None:
            return None
        if microbatch is None:
            if is_shape_inference():
                return None
            raise self._error("draws outside a microbatch", "call the model within microbatch.entered")
        if self._key is None:
            raise self._error("was added to the model after the core had named its modules", "add it in a transform")
        columns, features = self._own_columns(like, microbatch), self._own_features(like)
        if torch.compiler.is_compiling():  # the compiler fuses this with the surrounding operations
            return of_module(self._key, _tokens(microbatch, *columns), feature_words(self._key, *features))
        if columns not in microbatch.derived:
            microbatch.derived[columns] = _tokens(microbatch, *columns)
        if features not in self._derived:
            self._derived[features] = feature_words(self._key, *features)
        return of_module(self._key, microbatch.derived[columns], self._derived[features])

    def uniform(self, like: Tensor) -> Tensor:
        """Return fp32 numbers from ``[0, 1)`` in the shape of ``like``; outside a run, they come from torch's generator.

        Raises:
            UserError: see :meth:`words`.
        """
        words = self.words(like)
        if words is None:
            return torch.rand(like.shape, device=like.device)
        return ((element_bits(words) >> 7).float() * 2.0**-24).view(like.shape)

    def _own_columns(self, like: Tensor, microbatch: Microbatch) -> tuple[int, int]:
        """Return the index of the first batch column in ``like``, and the number of its columns."""
        batch = microbatch.batch
        size, seq = batch.tokens.shape
        share = -(-seq // self._ranks)
        if like.dim() < 3 or like.shape[0] != size or like.shape[1] not in (seq, share):
            expected = f"[{size}, {seq}, features...]" + (f" or [{size}, {share}, features...]" if share != seq else "")
            raise self._error(f"expects a tensor of shape {expected}, not {list(like.shape)}", "")
        if batch.rows is None:
            raise self._error("was called with a batch that has no row indices", "set Batch.rows")
        return (0 if like.shape[1] == seq else self._rank * share), like.shape[1]

    def _own_features(self, like: Tensor) -> tuple[int, int]:
        """Return the index of the first feature in ``like``, and the number of its features."""
        count = like.shape[2:].numel()
        if self._ranks == 1 or count == self._features:
            return 0, count
        if self._features is None:
            raise self._error("is sharded, but its total number of features is unknown", "")
        share = -(-self._features // self._ranks)
        first = min(self._rank * share, self._features)
        if count != min(share, self._features - first):
            why = f"expects {self._features} features per token, or this rank's share of {share}, not {count}"
            raise self._error(why, "draw either before or after the features are gathered")
        return first, count

    def _error(self, why: str, fix: str) -> UserError:
        name = "a RandomStream" if self._name is None else f"module {self._name!r}"
        return UserError.one(f"{name} of the model", why, fix)


def _tokens(microbatch: Microbatch, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the token words of ``count`` columns, starting at ``first``."""
    batch = microbatch.batch
    assert batch.rows is not None
    columns = torch.arange(batch.tokens.shape[1], device=batch.tokens.device) if batch.columns is None else batch.columns
    return token_words(microbatch.key, batch.rows, columns.narrow(-1, first, count))


def divide_streams(model: nn.Module, rank: int, ranks: int) -> None:
    """Call :meth:`RandomStream.divide` on every :class:`RandomStream` in ``model``."""
    for module in model.modules():
        if isinstance(module, RandomStream):
            module.divide(rank, ranks)


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
