"""The floating-point operations of training a model of which some parameters are frozen.

A trained matrix is multiplied three times: forward, for the gradient of its input, and for its own gradient. A frozen one
has no gradient of its own, and none of its input where no parameter before it is trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titan_core.api.model.layout import ModelDefinition, ModelLayout, matches
from titan_core.api.model.layout_rules import Experts


@dataclass(frozen=True)
class _Matrix:
    """A parameter by which tokens are multiplied."""

    name: str
    unit: str
    """The module of the embedding or the head, or the block, that multiplies by it."""
    numel: float
    """Elements, of those of experts the share that a token uses."""
    trained: bool


class TrainedFlops:
    """Which operations the training of a model with frozen parameters has. Imports torch.

    Blocks count as a whole: in the first one with a trained parameter, the gradients of all inputs are counted.
    """

    def __init__(self, definition: ModelDefinition, frozen: Sequence[str], added: bool = False) -> None:
        """
        Args:
            frozen: patterns of names; a shared parameter is frozen under any of its names.
            added: whether transforms add trained parameters to the blocks, whose own operations are not counted.
        """
        import torch

        with torch.device("meta"):
            model: Any = definition.build()
        layout = self._layout = definition.layout
        self._definition = definition
        self._units = [
            *layout.embedding,
            *(f"{layout.blocks}.{number}" for number in range(layout.num_blocks)),
            *layout.head,
        ]
        shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
        shared = {source for name, source in layout.tied.items() if matches(name, frozen)}
        is_frozen = {name: name in shared or matches(name, frozen) for name in shapes}
        used = {**{name: name for name in shapes}, **layout.tied}  # name where it is used -> name of the parameter
        trained = {self._unit(name) for name, own in used.items() if not is_frozen.get(own, True)}
        if added:
            trained.add(f"{layout.blocks}.0")
        begins = [number for number, unit in enumerate(self._units) if unit in trained]
        self._first = min(begins, default=len(self._units))
        shares = _shares(model, layout)
        self._matrices = [
            _Matrix(name, self._unit(name), math.prod(shapes[own]) * self._share(name, shares), not is_frozen[own])
            for name, own in used.items()
            if own in shapes and len(shapes[own]) > 1 and self._unit(name) not in layout.embedding
        ]

    def per_token(self, seq_len: int) -> float:
        """Return the floating-point operations of the training of a token, forward and backward."""
        whole = self._definition.flops_per_token(seq_len)
        saved = sum(2.0 * one.numel * (3 - self._passes(one)) for one in self._matrices)
        # Attention multiplies by no parameters: twice as much backward as forward.
        layout, heads = self._layout, [one for one in self._matrices if one.unit in self._layout.head]
        of_blocks = whole - sum(6.0 * one.numel for one in heads)
        costs = layout.block_costs or (1.0,) * layout.num_blocks
        for number, cost in enumerate(costs):
            unit = f"{layout.blocks}.{number}"
            if self._units.index(unit) < self._first:
                matrices = sum(6.0 * one.numel for one in self._matrices if one.unit == unit)
                saved += 2.0 / 3.0 * max(0.0, of_blocks * cost / sum(costs) - matrices)
        return whole - saved

    def passes(self, module: str) -> float:
        """Return how often tokens are multiplied by the matrices of ``module`` in a step, forward and backward: 3 if all are
        trained."""
        own = [one for one in self._matrices if one.name.startswith(f"{module}.")]
        numel = sum(one.numel for one in own)
        return sum(self._passes(one) * one.numel for one in own) / numel if numel else 3.0

    def _passes(self, matrix: _Matrix) -> int:
        place = self._units.index(matrix.unit) if matrix.unit in self._units else len(self._units)
        # A module of the head multiplies once; the input of a block passes through several matrices.
        reaches = place > self._first or (place == self._first and matrix.unit not in self._layout.head)
        return 1 + matrix.trained + reaches

    def _unit(self, name: str) -> str:
        return next((unit for unit in self._units if name.startswith(f"{unit}.")), "")

    def _share(self, name: str, shares: Mapping[str, float]) -> float:
        return shares.get(self._unit(name), 1.0) if isinstance(self._layout.rule(name), Experts) else 1.0


def _shares(model: Any, layout: ModelLayout) -> dict[str, float]:
    """Return block -> share of its experts that a token uses."""
    depth = layout.blocks.count(".") + 2
    found = ((name, layout.router(name)) for name, _ in model.named_modules())
    return {
        ".".join(name.split(".")[:depth]): router.per_token / router.experts for name, router in found if router is not None
    }
