"""Going on from a checkpoint: which one, whether it can be used, and loading it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from titan_ckpt import state as plain
from titan_ckpt.catalogue import Entry, entry, step_folder, steps_in
from titan_ckpt.comparing import Changes, require_same_model, require_same_training
from titan_ckpt.config import CheckpointSection
from titan_ckpt.diverging_replicas import require_equal_weights
from titan_ckpt.dtypes import converts_exactly, dtype_name
from titan_ckpt.excluding import require_patterns_match
from titan_ckpt.folder import Folder
from titan_ckpt.foreign_start import begin_from_foreign, foreign_kind
from titan_ckpt.optimizer_restore import (
    OptimizerPlan,
    apply_restore,
    begin_optimizer,
    leaves_of,
    plan_restore,
    restore_groups,
    saved_rates,
)
from titan_ckpt.optimizer_state import OWN, parameter_names
from titan_ckpt.plain_values import Unsaveable, damaged
from titan_ckpt.reader import Reader
from titan_ckpt.stored import MODEL, OBSERVERS, OPTIMIZER, BrokenCheckpoint, Manifest
from titan_ckpt.tensors import by_copy, model_tensors, observers_tensors
from titan_core.api.checkpoint import CheckpointContext, RefusedChange, refusal
from titan_core.api.errors import Problem, UserError
from titan_core.api.tools.patterns import matches

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """What a run begins with."""

    step: int | None
    """That it resumes after; ``None`` at a beginning."""
    inherited: dict[str, Any] = field(default_factory=dict)
    """What its own checkpoints are to say of where its first weights came from."""


@dataclass(frozen=True)
class _Attempt:
    folder: Folder
    excluded: list[str]
    """Patterns of what not to load."""
    built: Sequence[Mapping[str, Any]]
    """The values of parameter groups as the config builds them."""


def restore(
    context: CheckpointContext[CheckpointSection],
    folder: Folder,
    built: Sequence[Mapping[str, Any]],
) -> Restored:
    """Resume from the newest whole checkpoint in ``folder``, or the one that the config names; without any, begin with the
    weights that it names.

    Args:
        built: the values of parameter groups as the config builds them.

    Raises:
        UserError: there are checkpoints, and none can be used.
    """
    world = context.world
    wanted = context.section.load_step
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        wanted = -1  # the launcher starts the job again after a failure: what it did since is not to be lost
    excluded = context.section.exclude_from_loading if wanted >= 0 else []
    candidates = [wanted] if wanted >= 0 else world.on_first_rank(lambda: steps_in(folder))
    problems: list[Problem] = []
    lost = False
    for step in candidates:
        found = world.on_first_rank(lambda step=step: entry(step_folder(folder, step), step))  # type: ignore[misc]
        problem = found.problem or _load(context, found, _Attempt(found.folder, excluded, built))
        if not problem:
            if problems:
                log.warning("resuming from step %d, not from the newest checkpoint", step)
            if wanted >= 0:
                _warn_of_later(context, folder, step)
            return Restored(step, _inherited(found))
        problems.append(Problem(str(found.folder), problem))
        lost = lost or not found.unfinished
        log.warning("%s cannot be used: %s", found.folder, problem)
    # What an interrupted first save has left is no reason not to start: nothing was lost with it.
    if wanted >= 0 or lost:
        fix = "set checkpoint.folder to another place to start over, or fix what is reported above"
        raise UserError(*problems, Problem(str(folder), "no checkpoint here can be used", fix))
    if context.section.initial_load_path:
        return Restored(None, _begin_from(context, context.section.initial_load_path, built))
    return Restored(None)


def _inherited(found: Entry) -> dict[str, Any]:
    assert found.manifest is not None
    return {key: found.manifest.about[key] for key in ("hf",) if key in found.manifest.about}


def _warn_of_later(context: CheckpointContext[CheckpointSection], folder: Folder, step: int) -> None:
    """Later checkpoints belong to what is being left, and would be taken first at the next start."""
    later = [one for one in context.world.on_first_rank(lambda: steps_in(folder)) if one > step]
    if later:
        log.warning(
            "%s has later checkpoints too, and a start without checkpoint.load_step takes the newest: "
            "`titan checkpoint rm %s --step %s` removes them",
            folder, folder, " ".join(map(str, reversed(later))),
        )  # fmt: skip


def _begin_from(
    context: CheckpointContext[CheckpointSection], path: str, built: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Begin with weights from elsewhere: another run's, or in another format.

    Returns:
        What the run's own checkpoints are to say of them.

    Raises:
        UserError: there are none, or they are another model's.
    """
    excluded = context.section.exclude_from_loading
    kind = foreign_kind(context, path)
    if kind is not None:
        return begin_from_foreign(context, Path(path), kind, excluded)
    folder = Folder(path)
    found = context.world.on_first_rank(lambda: _entry_or_problem(folder))
    attempt = _Attempt(folder, excluded, built)
    problem = found.problem or _load(context, found, attempt, weights_only=context.section.initial_load_model_only)
    if problem:
        where = context.job.config.where("checkpoint.initial_load_path", path)
        raise UserError.one(where, problem, "name the folder of a checkpoint, such as .../checkpoint/step-1000")
    return _inherited(found)


def _entry_or_problem(folder: Folder) -> Entry:
    """The checkpoint in ``folder``, whatever its storage may raise."""
    try:
        return entry(folder, 0)
    except Exception as error:  # noqa: BLE001 - a storage of fsspec's may raise anything, a missing package first
        return Entry(0, folder, None, getattr(error, "strerror", None) or str(error))


def _load(
    context: CheckpointContext[CheckpointSection],
    found: Entry,
    attempt: _Attempt,
    weights_only: bool = False,
) -> str:
    """Load a checkpoint; why it could not be loaded, if so. All ranks come to the same answer.

    Raises:
        UserError: it is whole, and of something else.
    """
    manifest, state, world = found.manifest, context.state, context.world
    assert manifest is not None
    weights_only = weights_only or (manifest.model_only and manifest.step == 0)  # the initial weights
    if manifest.model_only and not weights_only:
        return "it holds only weights, which a run cannot resume from (checkpoint.initial_load_path can begin with them)"
    _require_same_replicas(context, found.folder, manifest, weights_only)
    tensors = model_tensors(state.parts)
    if not weights_only:
        tensors |= observers_tensors(context.lifecycle)
    _require_patterns_match(context, found.folder, manifest, tensors, attempt.excluded)
    tensors = {name: one for name, one in tensors.items() if not matches(name, attempt.excluded)}
    _require_same_tensors(context, found.folder, manifest, tensors, attempt.excluded, exact=not weights_only)
    if manifest.diverging_replicas == world.plan.diverging_replicas:
        tensors = by_copy(tensors, world)
    optimizer = None
    if not weights_only:
        changes = _require_same_training(context, manifest, context.section.allow_changed)
        optimizer = _plan_optimizer(context, found, manifest, attempt.excluded)
        tensors |= by_copy(optimizer.tensors, world)
    else:
        require_same_model(context.job, manifest.about, context.section.allow_changed, partial=bool(attempt.excluded))
    try:
        load(tensors, storage_reader=Reader(found.folder, manifest))
    except CheckpointException as error:
        reasons = [one[0] if isinstance(one, tuple) else one for one in error.failures.values()]
        if not all(isinstance(reason, BrokenCheckpoint | OSError) for reason in reasons):
            raise
        state.optimizer.state.clear()  # what was made to load into
        return str(reasons[0])
    if optimizer is None:
        log.info("beginning with the weights of %s", found.folder)
        return ""
    broken, mistake = "", None
    try:
        _apply(context, manifest, optimizer, attempt, changes)
    except ValueError as error:
        broken = f"its state is damaged: {error}"
    except UserError as error:
        mistake = error
    world.raise_together(mistake)
    broken = next(filter(None, world.gather(broken)), "")
    if broken:
        state.optimizer.state.clear()
        return broken
    log.info("resuming after step %d from %s", manifest.step, found.folder)
    return ""


def _require_same_training(
    context: CheckpointContext[CheckpointSection], manifest: Manifest, allowed: Sequence[str]
) -> Changes:
    """See :func:`~titan_ckpt.comparing.require_same_training`; the data is compared too.

    Raises:
        UserError: the job trains something else; on every rank.
    """
    of_data: list[RefusedChange] = []
    with suppress(ValueError), damaged("the data's"):  # restoring the data's state reports the damage
        of_data = context.state.loader.refused_changes(manifest.state["loader"], allowed)
    changes, mistake = Changes((), ()), None
    try:
        changes = require_same_training(context.job, manifest.about, manifest.step, allowed, of_data)
    except UserError as error:
        mistake = error
    context.world.raise_together(mistake)
    return changes


def _plan_optimizer(
    context: CheckpointContext[CheckpointSection], found: Entry, manifest: Manifest, excluded: list[str]
) -> OptimizerPlan:
    """Where the optimizer's state goes.

    Raises:
        UserError: it is another optimizer's; on every rank.
    """
    state, world = context.state, context.world
    begin_optimizer(state.optimizer)
    saved, plan, mistake = manifest.state["optimizer"], OptimizerPlan(), None
    try:
        same_mesh = manifest.state["mesh"] == dict(world.plan.degrees)
        with damaged("the optimizer's"):
            plan = plan_restore(state.parts, state.optimizer, saved, manifest.tensors, excluded, same_mesh)
    except Unsaveable as error:
        mistake = UserError.one(error.name, error.why)
    except ValueError as error:
        mistake = UserError.one(str(found.folder), f"the optimizer's state in it is damaged: {error}")
    world.raise_together(mistake)
    names = {name for names in world.gather(list(parameter_names(state.parts).values())) for name in names}
    gone = [f"{OPTIMIZER}.{name}" for name in saved["parameters"] if name not in names]
    problems = [f"{name} is not here" for name in gone if not matches(name, excluded)]
    problems = list(dict.fromkeys([one for of_rank in world.gather(plan.problems) for one in of_rank] + problems))
    if problems:
        state.optimizer.state.clear()
        raise _another_optimizer(found.folder, problems)
    return plan


def _apply(
    context: CheckpointContext[CheckpointSection],
    manifest: Manifest,
    optimizer: OptimizerPlan,
    attempt: _Attempt,
    changes: Changes,
) -> None:
    """What comes after the tensors are loaded.

    Raises:
        UserError: it does not belong to this job.
        ValueError: it is damaged.
    """
    state, saved = context.state, manifest.state["optimizer"]
    names = parameter_names(state.parts)
    anew = optimizer.excluded
    with damaged("the optimizer's"):
        apply_restore(state.optimizer, optimizer)
        problems = restore_groups(state.optimizer, names, saved, attempt.built, anew, changes.accepts_group_value)
        if problems:
            raise _another_optimizer(attempt.folder, problems, changes.allowed)
        saved_rates(state.optimizer, names, saved, anew)
    plain.apply(dict(manifest.state), context, changes.allowed, changes.schedule)


def _another_optimizer(folder: Folder, problems: list[str], allowed: Sequence[str] = ()) -> UserError:
    fix = "use the optimizer and the parameter groups that it was saved with"
    why = f"its optimizer is another one: {_shown(problems)}"
    keys = [one.partition(" ")[0] for one in problems if one.startswith(f"{OPTIMIZER}.groups.")]
    if keys:
        return refusal([RefusedChange(key, Problem(str(folder), why, fix)) for key in dict.fromkeys(keys)], allowed)
    fix += ', or leave its state out: checkpoint.exclude_from_loading = ["optimizer.*"] with checkpoint.load_step'
    return UserError.one(str(folder), why, fix)


def _shown(problems: list[str]) -> str:
    return "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")


def _require_same_replicas(
    context: CheckpointContext[CheckpointSection], folder: Folder, manifest: Manifest, weights_only: bool
) -> None:
    """Require the checkpoint to have as many diverging replicas as the job: each resumes from its own weights. Weights alone
    may start any number of replicas, if the checkpoint's replicas are equal.

    Raises:
        UserError: the numbers differ, or the weights of the replicas do; on every rank.
    """
    here, there = context.world.plan.diverging_replicas, manifest.diverging_replicas
    if here == there:
        return
    if not weights_only:
        why = f"it holds {there} diverging replicas of the model, and this job trains {here}"
        fix = f"resume with {there}, or start a new run from the weights with checkpoint.initial_load_path"
        raise UserError.one(str(folder), why, fix)
    context.world.on_first_rank(lambda: require_equal_weights(folder, manifest))


def _require_patterns_match(
    context: CheckpointContext[CheckpointSection],
    folder: Folder,
    manifest: Manifest,
    tensors: Mapping[str, Tensor],
    excluded: list[str],
) -> None:
    """See :func:`~titan_ckpt.excluding.require_patterns_match`.

    Raises:
        UserError: a pattern matches nothing; on every rank.
    """
    if not excluded:
        return
    names = [*manifest.tensors, *(name for of_rank in context.world.gather(list(tensors)) for name in of_rank)]
    saved = manifest.state.get("optimizer", {}).get("parameters", {})
    names += [leaf for name, tree in saved.items() for leaf in leaves_of(tree, f"{OPTIMIZER}.{name}")]
    names += [f"{OPTIMIZER}.{name}" for name in saved] + [OPTIMIZER, OWN]
    require_patterns_match(context.job, excluded, names, str(folder))


def _require_same_tensors(
    context: CheckpointContext[CheckpointSection],
    folder: Folder,
    manifest: Manifest,
    tensors: Mapping[str, Tensor],
    excluded: list[str],
    exact: bool,
) -> None:
    """Names, shapes and types must be those of the checkpoint.

    Args:
        exact: whether types must be the same; otherwise the model's must hold every value of the checkpoint's.

    Raises:
        UserError: on every rank, naming the first few that are not.
    """
    ours: dict[str, tuple[tuple[int, ...], str]] = {}
    for of_rank in context.world.gather({name: (tuple(one.shape), dtype_name(one.dtype)) for name, one in tensors.items()}):
        ours |= of_rank
    differences = []
    for name, (shape, dtype) in ours.items():
        there = manifest.tensors.get(name)
        if there is None:
            differences.append(f"{name} is not there")
        elif there.shape != shape:
            differences.append(f"{name} is {list(there.shape)} there and {list(shape)} here")
        elif there.dtype != dtype and (exact or not converts_exactly(there.dtype, dtype)):
            differences.append(f"{name} is {there.dtype} there and {dtype} here, which does not hold the same values")
    prefixes = (f"{MODEL}.", f"{OBSERVERS}.") if exact else (f"{MODEL}.",)
    theirs = (name for name in manifest.tensors if name.startswith(prefixes))
    differences += [f"{name} is not here" for name in theirs if name not in ours and not matches(name, excluded)]
    if differences:
        model = manifest.about.get("model", "another model")
        raise UserError.one(
            str(folder),
            f"it is a checkpoint of {model}, and this job trains {context.job.name}: {_shown(differences)}",
            "train that model, set checkpoint.folder to another place, or name what differs in "
            "checkpoint.exclude_from_loading",
        )
