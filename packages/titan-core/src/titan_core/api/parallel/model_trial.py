"""A small copy of the model that transforms can run before the model is sharded.

The core makes the copy and passes it to the ``check_model`` of each active transform. The transform applies its own change
to the copy and compares the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from titan_core.api.model.layout import ModelLayout
from titan_core.api.plugins.errors import Problem

Around = Callable[..., Any]
"""(forward, the module's arguments) -> result: a function called in place of a module's forward."""


@dataclass(frozen=True)
class ModuleCall:
    """A call of a module."""

    name: str
    """Fully qualified name of the module."""
    arguments: tuple[Any, ...]
    """The arguments, with tensors replaced by their shapes."""
    output: Any
    """The result, with tensors replaced by their shapes."""


@dataclass(frozen=True)
class Shares:
    """How positions are sharded over ranks. A trial represents its ranks in the batch: ``[ranks * batch, share, ...]``."""

    positions: tuple[Tensor, ...]
    """Positions of each rank; the same number on all ranks."""

    def split(self, whole: Tensor, dim: int = 1) -> Tensor:
        """Convert ``[batch, seq, ...]`` to ``[ranks * batch, share, ...]``."""
        return torch.cat([whole.index_select(dim, share.to(whole.device)) for share in self.positions])

    def join(self, shares: Tensor, dim: int = 1) -> Tensor:
        """Invert :meth:`split`."""
        order = torch.cat(self.positions).argsort().to(shares.device)
        return torch.cat(shares.chunk(len(self.positions)), dim).index_select(dim, order)


class ModelTrial(Protocol):
    """A small copy of a model, with its results for a few tokens."""

    layout: ModelLayout
    """The layout of the small copy, which may have fewer blocks than the model."""
    tokens: Tensor
    """``[batch, seq]``."""
    positions: Tensor
    """``[batch, seq]``: ``0 .. seq - 1``."""
    seq: int
    """Number of tokens of each sequence."""
    logits: Any
    """The logits of the unsharded copy for :attr:`tokens`."""
    calls: list[ModuleCall]
    """The module calls that produced :attr:`logits`, in the order in which they ended."""

    def run(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        around: Mapping[str, Around] | None = None,
    ) -> Any:
        """ModuleCall the copy and restore its state.

        Args:
            around: module name -> function called in place of the module's forward.
        """

    def module(self, name: str) -> nn.Module:
        """Return the copy's module called ``name``. Outside :meth:`run`, callers must not change it."""

    def same(self, logits: Any, expected: Tensor | None = None) -> bool:
        """Whether ``logits`` equal those of the unsharded copy, or ``expected``, to rounding."""

    def fault(self, run: Callable[[], Any], shares: Shares | None = None, sequence: int | None = None) -> str | None:
        """Return ``None`` if ``run`` returns the logits of the unsharded copy; otherwise, describe where it first differs.

        Args:
            shares: how ``run`` shards positions.
            sequence: index of the sequence that ``run`` computes, if it computes only one.
        """

    def positions_fault(self) -> str | None:
        """Describe what goes wrong if the default positions are passed explicitly; ``None`` if nothing does."""

    def problem(self, why: str, fix: str) -> Problem:
        """Return a problem with the layout or the model."""

    def units(self) -> list[str]:
        """Return the names of the modules that hidden states pass through, in order: embedding, blocks, head."""

    def calls_of(self, names: Iterable[str]) -> list[ModuleCall]:
        """Return the calls of the modules called ``names``, in call order."""
