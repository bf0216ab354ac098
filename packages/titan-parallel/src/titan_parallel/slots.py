"""The slots in which other plugins leave values for these transforms. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from titan_core.api import Ref, Slot

if TYPE_CHECKING:
    from torch import Tensor

REGION_CASTS: Slot[Callable[[Tensor], Tensor]] = Slot(
    name="titan_parallel.region_casts",
    summary="region -> cast of the input that its layers share, applied to each rank's positions before the all-gather",
    accepts=Ref("titan_parallel.slots:function"),
)
COMPILER_OPTIONS: Slot[Mapping[str, Any]] = Slot(
    name="titan_parallel.compiler_options",
    summary="module -> options of inductor for the block that contains the module",
    accepts=Ref("titan_parallel.slots:options"),
)
SAVE_POLICIES: Slot[Callable[[Any, int], bool | None]] = Slot(
    name="titan_parallel.save_policies",
    summary='block -> what selective_ac_option = "op" saves in it: (operator, number of its call) -> True, False or None',
    accepts=Ref("titan_parallel.slots:function"),
)
PARTIAL_GRADIENTS: Slot[tuple[str, ...]] = Slot(
    name="titan_parallel.partial_gradients", summary="module -> its parameters whose gradients are shares of the sum"
)


def function(value: object) -> Callable[..., Any]:
    """Return ``value`` if it is a function.

    Raises:
        TypeError: it is not.
    """
    if not callable(value):
        raise TypeError(f"it must be a function, not {value!r}")
    return value


def options(value: object) -> Mapping[str, Any]:
    """Return ``value`` if it is a mapping from names of options.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"it must be a mapping from names of options to values, not {value!r}")
    return value
