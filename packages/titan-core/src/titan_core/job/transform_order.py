"""The order in which transforms are applied to a model."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from titan_core.api.components import Phase
from titan_core.api.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from titan_core.api.components import Transform


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
