"""Tokens that become one row of a batch. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from titan_core.api.data.replay import UsedTokens


@dataclass(frozen=True)
class Window:
    """Successive tokens of a stream: the end of one document, whole documents, the beginning of another."""

    pieces: list[NDArray[Any]]
    """The tokens, one array per document."""
    weights: list[NDArray[Any] | None] = field(default_factory=list)
    """The weights of each piece's tokens as targets; ``None``: every weight is 1."""
    extras: list[Mapping[str, NDArray[Any]]] = field(default_factory=list)
    """The extra values of each piece, by name."""
    used: list[UsedTokens] = field(default_factory=list)
    """The document of each piece, if the stream is traced."""

    def __len__(self) -> int:
        return sum(map(len, self.pieces))
