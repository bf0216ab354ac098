"""The device mesh as arithmetic: which dimensions there are and how large each is. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from titan_core.api.errors import Problem, UserError
from titan_core.api.mesh import REMAINDER_KEY, MeshDim, MeshPlan, dims_in_order

if TYPE_CHECKING:
    from titan_core.api.config import Config


def plan_mesh(config: Config, extra_dims: Iterable[MeshDim], world_size: int | None) -> MeshPlan:
    """The degrees that ``config`` asks for, ``-1`` resolved.

    Args:
        world_size: number of ranks, or ``None`` for the smallest world that the config allows.

    Raises:
        UserError: the degrees do not multiply to ``world_size``.
    """
    dims = dims_in_order(extra_dims)
    degrees: dict[str, int] = {dim.name: int(config.value(dim.degree_key)) for dim in dims}
    fixed = math.prod(degree for degree in degrees.values() if degree > 0)
    if degrees["dp_shard"] == 0:
        raise UserError(config.problem(REMAINDER_KEY, "must be at least 1, or -1 for all ranks that are left"))
    if degrees["dp_shard"] == -1:
        if world_size is not None and world_size % fixed:
            raise UserError(_mismatch(config, dims, degrees, world_size))
        degrees["dp_shard"] = 1 if world_size is None else world_size // fixed
    elif world_size is not None and fixed != world_size:
        raise UserError(_mismatch(config, dims, degrees, world_size))
    return MeshPlan(dims, degrees)


def _mismatch(config: Config, dims: Iterable[MeshDim], degrees: Mapping[str, int], world_size: int) -> Problem:
    asked = {dim.degree_key: degrees[dim.name] for dim in dims if degrees[dim.name] > 1}
    fixed = math.prod(asked.values())
    terms = " x ".join(f"{key} {degree}" for key, degree in asked.items())
    wide = [key for key in asked if key != REMAINDER_KEY] or [REMAINDER_KEY]
    if degrees["dp_shard"] > 0:
        fix = f"set {REMAINDER_KEY} = -1 to take all ranks that are left, or start {fixed} processes"
    else:
        fix = f"start a multiple of {fixed} processes, or lower a degree"
    reason = f"the degrees multiply to {fixed} ({terms or 'all 1'}), and there are {world_size} processes"
    return Problem(config.where(wide[0], config.value(wide[0])), reason, fix)
