"""The order in which transforms are applied to a model."""

from __future__ import annotations

from enum import IntEnum
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from titan_core.api.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from titan_core.api.components import Transform


class Phase(IntEnum):
    """The phases, in the order of their application. Why this order:

    a pipeline cut decides which modules a rank has at all; precision swaps linear layers, so that everything later wraps
    the swapped ones; tensor parallelism shards them; context parallelism works on what is left of the heads;
    recomputation must see the final operators, and the compiler must see recomputation; data parallelism goes last,
    because it hooks the boundaries of whole compiled blocks.
    """

    PIPELINE = 1
    PRECISION = 2
    TENSOR = 3
    CONTEXT = 4
    RECOMPUTE = 5
    COMPILE = 6
    DATA = 7


def in_order(transforms: Iterable[Transform]) -> list[Transform]:
    """``transforms`` by phase, and within a phase by their ``before`` and ``after``, then by name.

    Raises:
        UserError: the wishes of the transforms of one phase contradict each other.
    """
    transforms = sorted(transforms, key=lambda transform: transform.name)
    ordered: list[Transform] = []
    for phase in Phase:
        here = {transform.name: transform for transform in transforms if transform.phase is phase}
        graph: dict[str, set[str]] = {name: set() for name in here}
        for name, transform in here.items():
            graph[name].update(other for other in transform.after if other in here)
            for other in transform.before:
                if other in here:
                    graph[other].add(name)
        sorter = TopologicalSorter(graph)
        try:
            sorter.prepare()
        except CycleError as error:
            circle = " before ".join(error.args[1])
            raise UserError.one(
                f"transforms of phase {phase.name}",
                f"their wishes for an order contradict each other: {circle}",
                "switch one of their plugins off ([plugins] disable = [...])",
            ) from None
        while sorter.is_active():
            ready = sorted(sorter.get_ready())
            ordered += [here[name] for name in ready]
            sorter.done(*ready)
    return ordered
