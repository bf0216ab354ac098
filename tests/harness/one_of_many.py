"""One rank of a fictitious mesh, with collectives that need no other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from titan_core.api import MeshDim, MeshPlan, World
from titan_core.api.parallel.mesh import STANDARD_DIMS

CPU = torch.device("cpu")
ISLANDS = MeshDim("islands", "local_sgd.islands", "batch", diverges=True)


class OneOfMany(World):
    """One rank of a fictitious mesh. ``others`` is what the other ranks add to each sum."""

    others: Any = 0

    def __init__(self, degrees: dict[str, int], at: dict[str, int] | None = None, extra: tuple[MeshDim, ...] = ()) -> None:
        dims = (*extra, *STANDARD_DIMS)
        plan = MeshPlan(dims, {dim.name: degrees.get(dim.name, 1) for dim in dims})
        super().__init__(rank=0, device=CPU, plan=plan, mesh=cast(Any, None))
        object.__setattr__(self, "at", at or {})
        object.__setattr__(self, "summed", [])

    def coordinate(self, dim: str) -> int:
        return cast(Any, self).at.get(dim, 0)

    def sum(self, tensor: Tensor) -> Tensor:
        cast(Any, self).summed.append(tensor.clone())
        return tensor + self.others

    def sum_later(self, tensor: Tensor, over_replica: bool = False) -> Callable[[], Tensor]:
        summed = self.sum_over_replica(tensor) if over_replica else self.sum(tensor)
        return lambda: summed

    def sum_over_replica(self, tensor: Tensor) -> Tensor:
        return self.sum(tensor)

    def gather(self, value: Any) -> list[Any]:
        return [value]
