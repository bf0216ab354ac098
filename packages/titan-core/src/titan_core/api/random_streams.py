"""Randomness inside of a model that is the same on any mesh, when blocks are recomputed, and after a run resumes.

A module that draws derives from :class:`RandomStream`. What it draws for an element is a function of the seed, the step, the
module's fully qualified name and the element's place in the global batch: the number of its sequence, its position, its
feature. The core names the modules when it builds a model; the place comes from :mod:`titan_core.api.microbatch`.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_core.api.errors import UserError
from titan_core.api.microbatch import Microbatch, current_microbatch
from titan_core.api.random_bits import Words, element_bits, feature_words, of_module, token_words
from titan_core.api.step import is_shape_inference


class RandomStream(nn.Module):
    """Base class of modules that draw, once in each forward pass of the model, for tensors ``[batch, seq, features...]``.

    A module that the core has not named belongs to a model that is called by hand: it has no place in a run, and
    :meth:`words` returns ``None``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._name: str | None = None
        self._key: Tensor | None = None
        self._features: int | None = None
        self._rank, self._ranks = 0, 1
        self._derived: dict[tuple[int, int], Tensor] = {}  # feature words, by first feature and features

    def begin(self, name: str, device: torch.device) -> None:
        """Called by the core when the model is built: the module's fully qualified name, and where it draws."""
        self._name = name
        digest = hashlib.sha256(name.encode()).digest()
        # A tensor and no number: one compiled graph serves the modules of all blocks. No buffer, since it is no state.
        self._key = torch.full((), int.from_bytes(digest[:8], "little", signed=True), dtype=torch.int64, device=device)

    def expect(self, features: int) -> None:
        """Called by the core before the model is divided: the number of elements that the module sees of each token."""
        self._features = features

    def divide(self, rank: int, ranks: int) -> None:
        """Called by a parallelism that gives each of ``ranks`` an equal, contiguous share of the positions, or of the
        features, of what the module sees. Which of both it is, or that nothing is divided there, shows in the shapes.

        Raises:
            ValueError: it is divided already.
        """
        if self._ranks > 1:
            raise ValueError(f"module {self._name!r} of the model is divided already")
        self._rank, self._ranks = rank, ranks

    def words(self, like: Tensor) -> Words | None:
        """The random words of the tokens and features of ``like``, ``[batch, seq, features...]``; ``None`` outside of a run.

        Raises:
            UserError: ``like`` has another shape, or the microbatch that it belongs to is unknown.
        """
        microbatch = current_microbatch()
        if self._key is None and microbatch is None:
            return None
        if microbatch is None:
            if is_shape_inference():
                return None
            raise self._error("it draws, and no microbatch is entered", "call the model within microbatch.entered")
        if self._key is None:
            raise self._error("it was added to the model after the core had named its modules", "add it in a transform")
        columns, features = self._own_columns(like, microbatch), self._own_features(like)
        if torch.compiler.is_compiling():  # which fuses it with what is around
            return of_module(self._key, _tokens(microbatch, *columns), feature_words(self._key, *features))
        if columns not in microbatch.derived:
            microbatch.derived[columns] = _tokens(microbatch, *columns)
        if features not in self._derived:
            self._derived[features] = feature_words(self._key, *features)
        return of_module(self._key, microbatch.derived[columns], self._derived[features])

    def uniform(self, like: Tensor) -> Tensor:
        """Numbers from ``[0, 1)``, fp32, of the shape of ``like``: of torch's generator outside of a run.

        Raises:
            UserError: see :meth:`words`.
        """
        if isinstance(like, DTensor):
            return like_dtensor(like, self.uniform(like.to_local()))
        words = self.words(like)
        if words is None:
            return torch.rand(like.shape, device=like.device)
        return ((element_bits(words) >> 7).float() * 2.0**-24).view(like.shape)

    def _own_columns(self, like: Tensor, microbatch: Microbatch) -> tuple[int, int]:
        """The first of the batch's columns that ``like`` has, and how many it has."""
        batch = microbatch.batch
        size, seq = batch.tokens.shape
        share = -(-seq // self._ranks)
        if like.dim() < 3 or like.shape[0] != size or like.shape[1] not in (seq, share):
            expected = f"[{size}, {seq}, features...]" + (f" or [{size}, {share}, features...]" if share != seq else "")
            raise self._error(f"it draws for a tensor of shape {expected}, and was called with {list(like.shape)}", "")
        if batch.rows is None:
            raise self._error("the batch does not say which sequences of the global batch it holds", "set Batch.rows")
        return (0 if like.shape[1] == seq else self._rank * share), like.shape[1]

    def _own_features(self, like: Tensor) -> tuple[int, int]:
        """The first feature of ``like``, and how many it has."""
        count = like.shape[2:].numel()
        if self._ranks == 1 or count == self._features:
            return 0, count
        if self._features is None:
            raise self._error("it is divided, and the whole number of its features is unknown", "")
        share = -(-self._features // self._ranks)
        first = min(self._rank * share, self._features)
        if count != min(share, self._features - first):
            why = f"a rank has {self._features} features of a token or {share} of them, and it was called with {count}"
            raise self._error(why, "draw before features are gathered, or after")
        return first, count

    def _error(self, why: str, fix: str) -> UserError:
        name = "a RandomStream" if self._name is None else f"module {self._name!r}"
        return UserError.one(f"{name} of the model", why, fix)


def _tokens(microbatch: Microbatch, first: int, count: int) -> tuple[Tensor, Tensor]:
    """The words of the tokens in ``count`` columns from the ``first`` one."""
    batch = microbatch.batch
    assert batch.rows is not None
    columns = torch.arange(batch.tokens.shape[1], device=batch.tokens.device) if batch.columns is None else batch.columns
    return token_words(microbatch.key, batch.rows, columns.narrow(-1, first, count))


def divide_streams(model: nn.Module, rank: int, ranks: int) -> None:
    """Report a division to every :class:`RandomStream` in ``model``: see :meth:`RandomStream.divide`."""
    for module in model.modules():
        if isinstance(module, RandomStream):
            module.divide(rank, ranks)


def like_dtensor(like: DTensor, local: Tensor) -> DTensor:
    """``local`` divided as ``like``, which has the same shape."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
