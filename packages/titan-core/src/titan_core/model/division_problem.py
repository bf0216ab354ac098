"""Describes how a divided copy of a model differs from the undivided one, and what may be wrong."""

from __future__ import annotations

from functools import partial

from titan_core.api import Job, MeshDim, MeshPlan, MeshView, Problem, Transform
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.model.trial_differences import WrongGradient

_Place = tuple[int, str, str]
"""A place in the undivided copy's forward pass: its number in the order of calls, its description, and its module."""


_LOSSY = 0.1
"""Relative difference of a gradient up to which a lossy sum may explain it."""


def described(
    job: AssembledJob,
    order: dict[str, int],
    found: list[tuple[_Place | None, _Place | None, dict[str, WrongGradient]]],
    bound: float,
) -> Problem:
    """Return one problem for the differences that all ranks found.

    Args:
        bound: relative difference of a gradient that is accepted.
    """
    forward = min((place for place, _, _ in found if place is not None), default=None)
    backward = max((place for _, place, _ in found if place is not None), default=None)
    gradients: dict[str, WrongGradient] = {}
    for _, _, wrong in found:
        for name, difference in wrong.items():
            gradients[name] = max(gradients.get(name, difference), difference, key=lambda one: one.size)
    # The backward pass reaches the last module first; what is wrong there makes everything before it wrong.
    names = sorted(gradients, key=partial(_when, order), reverse=True)
    texts = [f"parameter {name!r} receives {gradients[name]}" for name in names[:3]]
    if len(names) > 3:
        texts.append(f"{len(names) - 3} further parameters receive other gradients")
    why = f"{', '.join(texts)}; {100 * bound:.3g} % is allowed"
    place = forward or backward
    if place is not None:
        return problem_of(job, f"{place[1]}: {why}", module=place[2])
    lossy = all(one.factor is None and one.size < _LOSSY for one in gradients.values())
    return problem_of(job, why, sums="lossy" if lossy else "other")


def _when(order: dict[str, int], parameter: str) -> int:
    """Return when the forward pass last left the module that owns ``parameter``, or one around it."""
    owner = parameter.rpartition(".")[0]
    while owner not in order and owner:
        owner = owner.rpartition(".")[0]
    return order.get(owner, 0)


def problem_of(job: AssembledJob, why: str, sums: str = "", module: str = "") -> Problem:
    """Return the problem of a wrong division.

    Args:
        sums: whether hidden states and their gradients are right, so that sums of gradients are suspected first; ``"lossy"``
            if no gradient is a multiple of the right one.
        module: the module that computes something else, if it is known.
    """
    used = used_dims(job.mesh)
    # Those that name a dimension in use are suspected before those that sum over all.
    by = sorted(
        (transform for transform in job.transforms if divides(transform, job)),
        key=lambda transform: not {*transform.mesh.sums} & {part.name for part in used},
    )
    plugins = " or ".join(str(job.registry.origin(transform)) for transform in by)
    undivided = f"or set {' or '.join(f'{part.degree_key} = 1' for part in used)}"
    place = f"model {job.model_name!r} on {job.mesh}"
    if sums:
        declared = ", declare their error if they are lossy on purpose: MeshUse(tolerance=...)" if sums == "lossy" else ""
        fix = "gradients are summed wrongly over ranks, because hidden states and their gradients are right: fix the sums "
        fix += f"that the transform declares{declared}, the rules of these parameters, or the model's code; {undivided}"
        return Problem(f"{plugins}: {place}", why, fix)
    fix = "the rules and mixers of its layout (a rank gets consecutive features of a parameter), the model's code, "
    mixer = job.model.layout.mixer(module)
    positions = any(isinstance(part, MeshDim) and part.divides == "sequence" for part in used)
    if positions and mixer is not None and mixer.divided is not None:
        fix = f"{mixer.divided.target!r}, which divides its positions, {fix}"
    return Problem(f"{place} ({', '.join(transform.name for transform in by)})", why, f"fix {fix}or {plugins}; {undivided}")


def divides(transform: Transform, job: Job) -> bool:
    """Whether ``transform`` implements a dimension or a view of the job's mesh."""
    keys = {part.degree_key for part in used_dims(job.mesh)}
    return bool(keys & transform.served) or bool(transform.mesh.sums)


def used_dims(plan: MeshPlan) -> list[MeshDim | MeshView]:
    """Return the dimensions and views of the mesh that are larger than 1."""
    parts: list[MeshDim | MeshView] = [*plan.dims, *plan.views]
    return [part for part in parts if plan.degree(part.name) > 1]
