"""The slot in which another plugin leaves how rows reach their experts. Free of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from titan_core.api import Ref, Slot

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from titan_experts.dispatch import Dispatch

DISPATCH: Slot[Callable[[DeviceMesh], Dispatch]] = Slot(
    name="titan_experts.dispatch",
    summary="module of experts -> (mesh of the ranks that divide them) -> what sends rows to their experts and back",
    accepts=Ref("titan_experts.slots:function"),
)


def function(value: object) -> Callable[[DeviceMesh], Dispatch]:
    """Return ``value`` if it is a function.

    Raises:
        TypeError: it is not.
    """
    if not callable(value):
        raise TypeError(f"it must be a function of a mesh, not {value!r}")
    return value
