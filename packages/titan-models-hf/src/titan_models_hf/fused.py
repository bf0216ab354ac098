"""Parameters of the library that join several layers, as the parameters of these layers: tensor parallelism divides the
features of each, and rows of a joined weight belong to different ranks in each layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Rows(NamedTuple):
    """Rows of a parameter of the library, of which another parameter consists."""

    parameter: str
    first: int
    size: int


class FusedLinear(nn.Module):
    """Several linear layers of the same input, whose outputs follow one another; in place of one layer of the library.

    Args:
        source: the library's layer.
        sizes: outputs of each layer.
    """

    def __init__(self, source: nn.Linear, sizes: Sequence[int]) -> None:
        super().__init__()
        width, bias = source.in_features, source.bias is not None
        self.parts = nn.ModuleList(nn.Linear(width, size, bias=bias, dtype=source.weight.dtype) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., inputs]`` to ``[..., outputs]``."""
        return torch.cat([part(x) for part in self.parts], dim=-1)


def rows_of(name: str, parts: Iterable[Any], of: str) -> dict[str, Rows]:
    """Return what the parameters of ``parts``, modules ``NAME.0``, ``NAME.1`` ..., consist of: rows of the parameters of the
    library's module ``of``, one part after another."""
    found, first = {}, 0
    for number, part in enumerate(parts):
        count = 0
        for leaf, parameter in part.named_parameters(recurse=False):
            count = len(parameter)
            found[f"{name}.{number}.{leaf}"] = Rows(f"{of}.{leaf}", first, count)
        first += count
    return found
