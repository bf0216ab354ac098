"""Randomness inside a model that does not depend on the mesh, on recomputation, or on when a run resumes.

Modules that draw random numbers derive from :class:`RandomStream`. The draw of an element depends only on the seed, the
step, the module's fully qualified name, and the element's place in the global batch: sequence number, position and feature.
The core names the modules when it builds a model; :mod:`titan_core.api.parallel.microbatch` provides the place.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from titan_core.api.model.random_bits import Words, element_bits, feature_words, of_module, token_words
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
