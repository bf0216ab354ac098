"""The mesh plan for a config and a world size. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from titan_core.api import Config, MeshDim, MeshPlan, MeshView, Problem, UserError
from titan_core.api.parallel.mesh import dims_in_order, sound_views


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
    declared = {view.name: view for view in sound_views(extra_views, dims)}
    views = tuple(_with_different_positions(view, dims, config) for view in declared.values())
    degrees: dict[str, int] = {dim.name: int(config.value(dim.degree_key)) for dim in dims}
    view_degrees: dict[str, int] = {view.name: int(config.value(view.degree_key)) for view in views}
    fixed = math.prod(degree for degree in degrees.values() if degree > 0)
    taking = [dim for dim in dims if dim.takes_rest and degrees[dim.name] < 1]
    if zero := [dim for dim in taking if degrees[dim.name] == 0]:
        raise UserError(config.problem(zero[0].degree_key, "must be at least 1, or -1 for all remaining ranks"))
    if len(taking) > 1:
        why = f"only one dimension can have all remaining ranks, and {taking[0].degree_key} is -1 too"
        raise UserError(config.problem(taking[1].degree_key, why, "set one of them to a number of ranks"))
    if taking:
        if world_size is not None and world_size % fixed:
            raise UserError(_mismatch(config, dims, degrees, world_size))
        rest = taking[0].name
        degrees[rest] = _smallest(rest, views, degrees, view_degrees) if world_size is None else world_size // fixed
    elif world_size is not None and fixed != world_size:
        raise UserError(_mismatch(config, dims, degrees, world_size))
    plan = MeshPlan(dims, degrees, views, view_degrees)
    refused = [view for view in views if plan.borrowed(view) % view_degrees[view.name]]
    problems = [_indivisible(config, plan, view, declared[view.name]) for view in refused]
    if problems:
        raise UserError(*problems)
    return plan


def _with_different_positions(view: MeshView, dims: Iterable[MeshDim], config: Config) -> MeshView:
    """Return ``view`` without the dimensions whose ranks all hold all positions in this job."""
    whole = {dim.name for dim in dims if dim.divides == "weights" and _is_whole(dim, config)}
    return replace(view, borrows=tuple(name for name in view.borrows if name not in whole))


def _is_whole(dim: MeshDim, config: Config) -> bool:
    return dim.whole_positions_key is None or bool(config.value(dim.whole_positions_key))


def _smallest(rest: str, views: Iterable[MeshView], degrees: Mapping[str, int], view_degrees: Mapping[str, int]) -> int:
    """Return the smallest degree of ``rest`` for which each view's degree divides the ranks that it borrows."""
    needed = [1]
    for view in views:
        if rest in view.borrows:
            others = math.prod(degrees[name] for name in view.borrows if name != rest)
            needed.append(view_degrees[view.name] // math.gcd(view_degrees[view.name], others))
    return math.lcm(*needed)


def _indivisible(config: Config, plan: MeshPlan, view: MeshView, declared: MeshView) -> Problem:
    """
    Args:
        declared: the view with the dimensions that other jobs lend it.
    """
    terms = " x ".join(f"{name} {plan.degrees[name]}" for name in view.borrows)
    ranks = plan.borrowed(view)
    fitting = [degree for degree in range(1, ranks + 1) if ranks % degree == 0]
    why = f"must divide the {ranks} ranks that mesh view {view.name!r} borrows ({terms})"
    fix = f"set {view.degree_key} = {_one_of(fitting)}, or increase {view.borrows[0]}"
    for dim in plan.dims:
        if dim.name in declared.borrows and dim.name not in view.borrows and plan.degrees[dim.name] > 1:
            why += f"; the {plan.degrees[dim.name]} ranks of {dim.name} hold the same positions"
            fix += "" if dim.whole_positions_key is None else f", or set {dim.whole_positions_key} = false"
    return config.problem(view.degree_key, why, fix)


def _mismatch(config: Config, dims: Sequence[MeshDim], degrees: Mapping[str, int], world_size: int) -> Problem:
    requested = {dim.degree_key: degrees[dim.name] for dim in dims if degrees[dim.name] > 1}
    fixed = math.prod(requested.values())
    terms = " x ".join(f"{key} {degree}" for key, degree in requested.items())
    rests = [dim for dim in dims if dim.takes_rest]
    of_rests = [dim.degree_key for dim in rests]
    wide = [key for key in requested if key not in of_rests] or of_rests or [dim.degree_key for dim in dims]
    if all(degrees[dim.name] > 0 for dim in rests):
        fix = f"start {fixed} processes"
        if rests and world_size % (fixed // degrees[rests[0].name]) == 0:
            fix = f"set {rests[0].degree_key} = -1 to use all remaining ranks, or {fix}"
    else:
        fix = f"start a multiple of {fixed} processes, or lower a degree"
    reason = f"the degrees multiply to {fixed} ({terms or 'all 1'}), but the world has {world_size} process(es)"
    return Problem(config.where(wide[0], config.value(wide[0])), reason, fix)


def _one_of(numbers: list[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last
