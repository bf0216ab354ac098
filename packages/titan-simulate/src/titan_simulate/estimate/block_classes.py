"""Blocks of a model that are alike, so that one of them stands for the others. Free of torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache

from titan_core.api import ModelLayout, matches


@cache
def unit_of(module: str, blocks: str) -> str:
    """Return the block that ``module`` is in, or what stands beside blocks, such as an embedding; ``""`` for what contains
    blocks.

    Args:
        blocks: name of the module whose children are the blocks, such as ``model.layers``.
    """
    if f"{blocks}.".startswith(f"{module}."):
        return ""
    return ".".join(module.split(".")[: blocks.count(".") + 2])


def block_classes(layout: ModelLayout, frozen: Collection[str] = ()) -> dict[str, int]:
    """Return name of each block -> number of its class. Blocks of a class have the same cost, attention and frozen
    parameters."""
    depth = layout.blocks.count(".") + 2
    kinds: list[object] = []
    found = {}
    for index in range(layout.num_blocks):
        name = f"{layout.blocks}.{index}"
        mixers = [
            mixer.options
            for pattern, mixer in layout.mixers.items()
            if matches(name, [".".join(pattern.split(".")[:depth])])
        ]
        fixed = sorted(one.removeprefix(name) for one in frozen if one.startswith(f"{name}."))
        kind = [fixed, *mixers, *(round(cost, 9) for cost in layout.block_costs[index : index + 1])]
        if kind not in kinds:
            kinds.append(kind)
        found[name] = kinds.index(kind)
    return found


def repetition(classes: Sequence[int]) -> tuple[int, int]:
    """Return after how many first blocks, and then each how many, the classes of blocks repeat: (3, 1) if the first three
    have no experts, (0, 6) if each sixth has no window. Together the fewest possible."""

    def period(rest: Sequence[int]) -> int:
        return next((n for n in range(1, len(rest)) if rest[n:] == rest[:-n]), len(rest))

    found = [(first, period(classes[first:])) for first in range(len(classes))]
    return min(found, key=sum)


def enough_blocks(classes: Sequence[int]) -> int:
    """Return how many of the first blocks of a model have one of each class that is neither the first nor the last, if that
    many exist."""
    for number in range(1, len(classes)):
        if set(classes[1 : number - 1]) == set(classes):
            return number
    return len(classes)
