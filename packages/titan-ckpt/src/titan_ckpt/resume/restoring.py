"""Resuming from a checkpoint: selecting it, checking that it fits the job, and loading it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from titan_ckpt.config import CheckpointSection
from titan_ckpt.contents import state as plain
from titan_ckpt.contents.optimizer_state import OWN, parameter_names
from titan_ckpt.contents.plain_values import Unsaveable, damaged
from titan_ckpt.contents.tensors import model_tensors, observer_tensors, with_replica_prefix
from titan_ckpt.foreign.config import hf_about, kind_of
from titan_ckpt.foreign.load import load_foreign
from titan_ckpt.format.catalogue import Entry, entry, pick, step_folder, steps_in
from titan_ckpt.format.chunks import require_equal_weights
from titan_ckpt.format.collector import paused_collector
from titan_ckpt.format.folder import Folder
from titan_ckpt.format.reader import Reader
from titan_ckpt.format.stored import OPTIMIZER, BrokenCheckpoint, Manifest
from titan_ckpt.resume.comparing import Changes, first_few, require_same_model, require_same_tensors, require_same_training
from titan_ckpt.resume.excluding import require_patterns_match
from titan_ckpt.resume.optimizer_restore import (
    OptimizerPlan,
    apply_restore,
    initialise_state,
    leaves_of,
    plan_restore,
    restore_groups,
    restore_rates,
)
from titan_core.api import CheckpointContext, Problem, RefusedChange, UserError, matches
from titan_core.toolkit.jobs import refused_changes
from titan_core.toolkit.launching import RESTART

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """The state that a run starts from."""

    step: int | None
    """Step that the run resumes after; ``None`` for a new run."""
    inherited: dict[str, Any] = field(default_factory=dict)
    """Entries for ``about`` of the run's own checkpoints that describe the origin of its initial weights."""


@dataclass(frozen=True)
class _Attempt:
    folder: Folder
    excluded: list[str]
    """Patterns of names not to load."""
    built: Sequence[Mapping[str, Any]]
    """Values of the parameter groups as built from the config."""


@paused_collector()
def restore(
    context: CheckpointContext[CheckpointSection],
    folder: Folder,
    built: Sequence[Mapping[str, Any]],
) -> Restored:
    """Resume from the newest complete checkpoint in ``folder``, or from that of ``checkpoint.load_step``. If there is none,
    start from ``checkpoint.initial_load_path`` if it is set.

    Args:
        built: values of the parameter groups as built from the config.

    Raises:
        UserError: there are checkpoints, but none can be used.
    """
    world = context.world
    wanted = context.section.load_step
    if world.on_first_rank(_restarted):
        wanted = -1  # keep the progress since load_step
    excluded = context.section.exclude_from_loading if wanted >= 0 else []
    steps = [wanted] if wanted >= 0 else world.on_first_rank(lambda: steps_in(folder))
    problems: list[Problem] = []
    lost = False
    for step in steps:
        found = world.on_first_rank(lambda step=step: entry(step_folder(folder, step), step))  # type: ignore[misc]
        problem = found.problem or _load(context, found, _Attempt(found.folder, excluded, built))
        if not problem:
            if problems:
                log.warning("resuming from step %d, which is not the newest checkpoint", step)
            if wanted >= 0:
                _warn_of_later(context, folder, step)
            return Restored(step, _inherited(found))
        problems.append(Problem(str(found.folder), problem))
        lost = lost or not found.unfinished
        log.warning("%s cannot be used: %s", found.folder, problem)
    # The leftovers of an interrupted first save do not prevent a new start, because they contain nothing of value.
    if wanted >= 0 or lost:
        fix = "set checkpoint.folder to another location to start over, or fix the problems above"
        raise UserError(*problems, Problem(str(folder), "no checkpoint in this folder can be used", fix))
    if context.section.initial_load_path:
        return Restored(None, _start_from(context, context.section.initial_load_path, built))
    return Restored(None)


def _restarted() -> bool:
    """Whether a launcher has restarted this job, after a failure or because machines joined or left."""
    return RESTART in os.environ or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _inherited(found: Entry) -> dict[str, Any]:
    assert found.manifest is not None
    return {key: found.manifest.about[key] for key in ("hf",) if key in found.manifest.about}


def _warn_of_later(context: CheckpointContext[CheckpointSection], folder: Folder, step: int) -> None:
    """Warn about checkpoints of later steps: the next start would resume from the newest of them."""
    later = [other for other in context.world.on_first_rank(lambda: steps_in(folder)) if other > step]
    if later:
        log.warning(
            "%s contains later checkpoints, and a start without checkpoint.load_step resumes from the newest; "
            "to remove them, run `titan checkpoint rm %s --step %s`",
            folder, quote(str(folder)), " ".join(map(str, reversed(later))),
        )  # fmt: skip


def _start_from(
    context: CheckpointContext[CheckpointSection], path: str, built: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Start from ``path``: a checkpoint of another run, or weights in another format.

    Returns:
        :attr:`Restored.inherited`.

    Raises:
        UserError: ``path`` contains no weights, or those of another model.
    """
    excluded = context.section.exclude_from_loading
    kind = context.world.on_first_rank(lambda: kind_of(Path(path)) if Path(path).is_dir() else None)
    if kind is not None:
        load_foreign(context.job, context.world, context.state.parts, Path(path), excluded, "checkpoint.initial_load_path")
        log.info("starting from the weights in %s", path)
        return hf_about(Path(path)) if kind == "safetensors" else {}
    found = context.world.on_first_rank(lambda: _entry_or_problem(path))
    attempt = _Attempt(found.folder, excluded, built)
    problem = found.problem or _load(context, found, attempt, weights_only=context.section.initial_load_model_only)
    if problem:
        where = context.job.config.where("checkpoint.initial_load_path", path)
        raise UserError.one(where, problem, "set it to a checkpoint, a run's directory, or a folder of weights")
    return _inherited(found)


def _entry_or_problem(path: str) -> Entry:
    """Read the checkpoint at ``path``, of a run the newest complete one. Errors become
    :attr:`~titan_ckpt.format.catalogue.Entry.problem`."""
    folder = Folder(path)
    try:
        return pick(path, None)
    except UserError as error:
        return Entry(0, folder, None, error.problems[0].why)
    except Exception as error:  # noqa: BLE001 - fsspec backends raise any type, e.g. ImportError for a missing package
        return Entry(0, folder, None, getattr(error, "strerror", None) or str(error))


def _load(
    context: CheckpointContext[CheckpointSection],
    found: Entry,
    attempt: _Attempt,
    weights_only: bool = False,
) -> str:
    """Load a checkpoint. Returns why it could not be loaded, or ``""``; the same on all ranks.

    Raises:
        UserError: the checkpoint is intact, but does not fit the job.
    """
    manifest, state, world = found.manifest, context.state, context.world
    assert manifest is not None
    weights_only = weights_only or (manifest.model_only and manifest.step == 0)  # the initial weights
    if manifest.model_only and not weights_only:
        return (
            "it contains only weights: no run can resume from it, but a new one can start with checkpoint.initial_load_path"
        )
    _require_same_replicas(context, found.folder, manifest, weights_only)
    tensors = model_tensors(state.parts)
    if not weights_only:
        tensors |= observer_tensors(context.lifecycle)
    _require_patterns_match(context, found.folder, manifest, tensors, attempt.excluded)
    tensors = {name: tensor for name, tensor in tensors.items() if not matches(name, attempt.excluded)}
    require_same_tensors(context.job, world, found.folder, manifest, tensors, attempt.excluded, exact=not weights_only)
    if manifest.diverging_replicas == world.plan.diverging_replicas:
        tensors = with_replica_prefix(tensors, world)
    optimizer = None
    if not weights_only:
        changes = _require_same_training(context, manifest, context.section.allow_changed)
        optimizer = _plan_optimizer(context, found, manifest, attempt.excluded)
        tensors |= with_replica_prefix(optimizer.tensors, world)
    else:
        require_same_model(context.job, manifest.about, context.section.allow_changed, partial=bool(attempt.excluded))
    try:
        load(tensors, storage_reader=Reader(found.folder, manifest))
    except CheckpointException as error:
        reasons = [failure[0] if isinstance(failure, tuple) else failure for failure in error.failures.values()]
        if not all(isinstance(reason, BrokenCheckpoint | OSError) for reason in reasons):
            raise
        state.optimizer.state.clear()  # created by _plan_optimizer to load into
        return str(reasons[0])
    if optimizer is None:
        log.info("starting from the weights in %s", found.folder)
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
    """Call :func:`~titan_ckpt.resume.comparing.require_same_training`, with the changes of the data.

    Raises:
        UserError: a change is not allowed; on every rank.
    """
    data_changes: list[RefusedChange] = []
    with suppress(ValueError), damaged("the position in the data"):  # restoring the data's state reports the damage
        data_changes = context.state.loader.refused_changes(manifest.state["loader"], allowed)
    changes, mistake = Changes((), ()), None
    try:
        changes = require_same_training(context.job, manifest.about, manifest.step, allowed, data_changes)
    except UserError as error:
        mistake = error
    context.world.raise_together(mistake)
    return changes


def _plan_optimizer(
    context: CheckpointContext[CheckpointSection], found: Entry, manifest: Manifest, excluded: list[str]
) -> OptimizerPlan:
    """Create the optimizer's state, and plan where to load each saved value.

    Raises:
        UserError: the saved state is of another optimizer, or damaged; on every rank.
    """
    state, world = context.state, context.world
    initialise_state(state.optimizer)
    saved, plan, mistake = manifest.state["optimizer"], OptimizerPlan(), None
    try:
        same_mesh = manifest.state["mesh"] == dict(world.plan.degrees)
        with damaged("the optimizer"):
            plan = plan_restore(state.parts, state.optimizer, saved, manifest.tensors, excluded, same_mesh)
    except Unsaveable as error:
        mistake = UserError.one(error.name, error.why)
    except ValueError as error:
        mistake = UserError.one(str(found.folder), f"its optimizer state is damaged: {error}")
    world.raise_together(mistake)
    names = {name for names in world.gather(list(parameter_names(state.parts).values())) for name in names}
    gone = [f"{OPTIMIZER}.{name}" for name in saved["parameters"] if name not in names]
    problems = [f"{name} is not in this job" for name in gone if not matches(name, excluded)]
    of_all_ranks = [problem for of_rank in world.gather(plan.problems) for problem in of_rank]
    problems = list(dict.fromkeys(of_all_ranks + problems))
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
    """Restore everything else, after the tensors were loaded.

    Raises:
        UserError: the saved state does not fit this job.
        ValueError: the saved state is damaged.
    """
    state, saved = context.state, manifest.state["optimizer"]
    names = parameter_names(state.parts)
    with damaged("the optimizer"):
        apply_restore(state.optimizer, optimizer)
        problems = restore_groups(
            state.optimizer, names, saved, attempt.built, optimizer.excluded, changes.accepts_group_value
        )
        if problems:
            raise _another_optimizer(attempt.folder, problems, changes.allowed)
        restore_rates(state.optimizer, names, saved, optimizer.excluded)
    plain.apply(dict(manifest.state), context, changes.allowed, changes.schedule)


def _another_optimizer(folder: Folder, problems: list[str], allowed: Sequence[str] = ()) -> UserError:
    fix = "use the optimizer and the parameter groups that it was saved with"
    why = f"it was saved with another optimizer: {first_few(problems)}"
    keys = [problem.partition(" ")[0] for problem in problems if problem.startswith(f"{OPTIMIZER}.groups.")]
    if keys:
        return refused_changes([RefusedChange(key, Problem(str(folder), why, fix)) for key in dict.fromkeys(keys)], allowed)
    fix += ', or exclude its state: set checkpoint.exclude_from_loading = ["optimizer.*"] and checkpoint.load_step'
    return UserError.one(str(folder), why, fix)


def _require_same_replicas(
    context: CheckpointContext[CheckpointSection], folder: Folder, manifest: Manifest, weights_only: bool
) -> None:
    """Require the checkpoint to have as many diverging replicas as the job: each resumes from its own weights. Weights alone
    may start any number of replicas, if the checkpoint's replicas are equal.

    Raises:
        UserError: the numbers differ, or the weights of the replicas do; on every rank.
    """
    wanted, saved = context.world.plan.diverging_replicas, manifest.diverging_replicas
    if wanted == saved:
        return
    if not weights_only:
        why = f"it contains {saved} diverging replicas of the model, but this job trains {wanted}"
        fix = f"resume with {saved}, or start a new run from the weights with checkpoint.initial_load_path"
        raise UserError.one(str(folder), why, fix)
    context.world.on_first_rank(lambda: require_equal_weights(folder, manifest))


def _require_patterns_match(
    context: CheckpointContext[CheckpointSection],
    folder: Folder,
    manifest: Manifest,
    tensors: Mapping[str, Tensor],
    excluded: list[str],
) -> None:
    """Call :func:`~titan_ckpt.resume.excluding.require_patterns_match` with the names in the checkpoint and in the job.

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
