"""The mesh plan for a config and a world size. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from titan_core.api import Config, MeshDim, MeshPlan, MeshView, Problem, UserError
from titan_core.api.parallel.mesh import REMAINDER_KEY, dims_in_order, sound_views


def plan_mesh(
    config: Config, extra_dims: Iterable[MeshDim], world_size: int | None, extra_views: Iterable[MeshView] = ()
) -> MeshPlan:
    """Return the mesh with the degrees that ``config`` sets, ``-1`` resolved.

    Args:
        world_size: number of ranks; ``None`` for the smallest world that the config allows.

    Raises:
        UserError: the degrees do not multiply to ``world_size``, or a view's degree does not divide the ranks that it
            borrows.
    """
    dims = dims_in_order(extra_dims)
    views = sound_views(extra_views, dims)
    degrees: dict[str, int] = {dim.name: int(config.value(dim.degree_key)) for dim in dims}
    view_degrees: dict[str, int] = {view.name: int(config.value(view.degree_key)) for view in views}
    fixed = math.prod(degree for degree in degrees.values() if degree > 0)
    if degrees["dp_shard"] == 0:
        raise UserError(config.problem(REMAINDER_KEY, "must be at least 1, or -1 for all remaining ranks"))
    if degrees["dp_shard"] == -1:
        if world_size is not None and world_size % fixed:
            raise UserError(_mismatch(config, dims, degrees, world_size))
        smallest = _smallest(views, degrees, view_degrees)
        degrees["dp_shard"] = smallest if world_size is None else world_size // fixed
    elif world_size is not None and fixed != world_size:
        raise UserError(_mismatch(config, dims, degrees, world_size))
    plan = MeshPlan(dims, degrees, views, view_degrees)
    problems = [_indivisible(config, plan, view) for view in views if plan.borrowed(view) % view_degrees[view.name]]
    if problems:
        raise UserError(*problems)
    return plan


def _smallest(views: Iterable[MeshView], degrees: Mapping[str, int], view_degrees: Mapping[str, int]) -> int:
    """Return the smallest ``dp_shard`` for which each view's degree divides the ranks that it borrows."""
    needed = [1]
    for view in views:
        if "dp_shard" in view.borrows:
            others = math.prod(degrees[name] for name in view.borrows if name != "dp_shard")
            needed.append(view_degrees[view.name] // math.gcd(view_degrees[view.name], others))
    return math.lcm(*needed)


def _indivisible(config: Config, plan: MeshPlan, view: MeshView) -> Problem:
    terms = " x ".join(f"{name} {plan.degrees[name]}" for name in view.borrows)
    ranks = plan.borrowed(view)
    fitting = [degree for degree in range(1, ranks + 1) if ranks % degree == 0]
    return config.problem(
        view.degree_key,
        f"must divide the {ranks} ranks that mesh view {view.name!r} borrows ({terms})",
        f"set {view.degree_key} = {_one_of(fitting)}, or increase {view.borrows[0]}",
    )


def _mismatch(config: Config, dims: Iterable[MeshDim], degrees: Mapping[str, int], world_size: int) -> Problem:
    requested = {dim.degree_key: degrees[dim.name] for dim in dims if degrees[dim.name] > 1}
    fixed = math.prod(requested.values())
    terms = " x ".join(f"{key} {degree}" for key, degree in requested.items())
    wide = [key for key in requested if key != REMAINDER_KEY] or [REMAINDER_KEY]
    if degrees["dp_shard"] > 0:
        fix = f"start {fixed} processes"
        if world_size % (fixed // degrees["dp_shard"]) == 0:
            fix = f"set {REMAINDER_KEY} = -1 to use all remaining ranks, or {fix}"
    else:
        fix = f"start a multiple of {fixed} processes, or lower a degree"
    reason = f"the degrees multiply to {fixed} ({terms or 'all 1'}), but the world has {world_size} process(es)"
    return Problem(config.where(wide[0], config.value(wide[0])), reason, fix)


def _one_of(numbers: list[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last
