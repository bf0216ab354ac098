"""What a transform may ask of a small copy of the model that runs, before anything is divided.

The core makes the copy and hands it to the ``check_model`` of each active transform, which does to it what the transform is
going to do to the model, and compares the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from titan_core.api.errors import Problem
from titan_core.api.layout import ModelLayout

Around = Callable[..., Any]
"""(forward, the module's arguments) -> result: what is called in place of a module's forward."""


@dataclass(frozen=True)
class Call:
    """A module was called."""

    name: str
    arguments: tuple[Any, ...]
    """Of tensors their shapes."""
    output: Any
    """As ``arguments``."""


@dataclass(frozen=True)
class Shares:
    """How positions are divided over ranks. The ranks of a trial are in the batch: ``[ranks * batch, share, ...]``."""

    positions: tuple[Tensor, ...]
    """Of each rank, the positions that it has; of all ranks as many."""

    def split(self, whole: Tensor, dim: int = 1) -> Tensor:
        """``[batch, seq, ...]`` to ``[ranks * batch, share, ...]``."""
        return torch.cat([whole.index_select(dim, one.to(whole.device)) for one in self.positions])

    def join(self, shares: Tensor, dim: int = 1) -> Tensor:
        """The inverse of :meth:`split`."""
        order = torch.cat(self.positions).argsort().to(shares.device)
        return torch.cat(shares.chunk(len(self.positions)), dim).index_select(dim, order)


class ModelTrial(Protocol):
    """A small copy of a model, and what it gives for a few tokens."""

    layout: ModelLayout
    tokens: Tensor
    """``[batch, seq]``."""
    positions: Tensor
    """``[batch, seq]``: ``0 .. seq - 1``."""
    seq: int
    logits: Any
    """What the undivided copy gives for :attr:`tokens`."""
    calls: list[Call]
    """The calls of modules that this took, in the order of their ends."""

    def run(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        around: Mapping[str, Around] | None = None,
    ) -> Any:
        """Call the copy, which is afterwards as it was.

        Args:
            around: module name -> what is called in place of its forward.
        """
        ...

    def module(self, name: str) -> nn.Module:
        """The copy's module called ``name``. Outside of :meth:`run` the caller leaves it as it is."""
        ...

    def same(self, logits: Any, expected: Tensor | None = None) -> bool:
        """Whether ``logits`` are those of the undivided copy (or ``expected``), to rounding."""
        ...

    def fault(self, run: Callable[[], Any], shares: Shares | None = None, sequence: int | None = None) -> str | None:
        """``None`` where ``run`` gives the logits of the undivided copy; otherwise where it begins to differ, in words.

        Args:
            shares: how ``run`` divides positions.
            sequence: the only sequence of the batch that ``run`` computes.
        """
        ...

    def positions_fault(self) -> str | None:
        """What is wrong where the default positions are given explicitly."""
        ...

    def problem(self, why: str, fix: str) -> Problem:
        """A mistake in the layout or in the model."""
        ...

    def units(self) -> list[str]:
        """The modules that hidden states pass through, in order: of the embedding, blocks, of the head."""
        ...

    def calls_of(self, names: Iterable[str]) -> list[Call]:
        """The calls of the modules called ``names``, in their order."""
        ...
