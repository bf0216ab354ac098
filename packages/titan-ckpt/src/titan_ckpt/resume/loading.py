"""Loading a checkpoint: what must fit the job, and what is loaded in which order."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from titan_ckpt.all_ranks import on_all_ranks
from titan_ckpt.config import CheckpointSection
from titan_ckpt.contents import state as plain
from titan_ckpt.contents.optimizer_state import OWN, parameter_names
from titan_ckpt.contents.plain_values import Unsaveable, damaged
from titan_ckpt.contents.tensors import (
    model_tensors,
    observer_tensors,
    require_patterns_match,
    with_replica_prefix,
    without_absent,
)
from titan_ckpt.format.catalogue import Entry
from titan_ckpt.format.chunks import require_equal_weights
from titan_ckpt.format.folder import Folder
from titan_ckpt.format.reader import Reader
from titan_ckpt.format.stored import OPTIMIZER, Manifest
from titan_ckpt.resume.comparing import Changes, first_few, require_same_model, require_same_tensors, require_same_training
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
from titan_core.api.checkpoint.store import refused_changes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Attempt:
    """An attempt to load a checkpoint."""

    folder: Folder
    excluded: list[str]
    """Patterns of names not to load."""
    built: Sequence[Mapping[str, Any]]
    """Values of the parameter groups as built from the config."""


def load_checkpoint(
    context: CheckpointContext[CheckpointSection],
    found: Entry,
    attempt: Attempt,
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
    if weights_only:
        tensors = without_absent(context.job, tensors, manifest.tensors)
    require_same_tensors(context.job, world, found.folder, manifest, tensors, attempt.excluded, exact=not weights_only)
    if manifest.diverging_replicas == world.plan.diverging_replicas:
        tensors = with_replica_prefix(tensors, world)
    optimizer = None
    if not weights_only:
        allowed = [*context.section.allow_changed, *context.job.planned_changes(manifest.step)]
        changes = _require_same_training(context, manifest, allowed)
        optimizer = _plan_optimizer(context, found, manifest, attempt.excluded, changes)
        tensors |= with_replica_prefix(optimizer.tensors, world)
    else:
        require_same_model(context.job, manifest.about, context.section.allow_changed, partial=bool(attempt.excluded))
    if problem := Reader(found.folder, manifest).load_on_all(tensors, world):
        state.optimizer.state.clear()  # created by _plan_optimizer to load into
        return problem
    if optimizer is None:
        log.info("starting from the weights in %s", found.folder)
        return ""
    plan = optimizer
    _, damage = on_all_ranks(lambda: _apply(context, manifest, plan, attempt, changes), world, (ValueError,))
    if damage:
        state.optimizer.state.clear()
        return f"its state is damaged: {damage}"
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
    changes, _ = on_all_ranks(
        lambda: require_same_training(context.job, manifest.about, manifest.step, allowed, data_changes), context.world
    )
    assert changes is not None
    return changes


def _plan_optimizer(
    context: CheckpointContext[CheckpointSection], found: Entry, manifest: Manifest, excluded: list[str], changes: Changes
) -> OptimizerPlan:
    """Create the optimizer's state, and plan where to load each saved value.

    Raises:
        UserError: the saved state is of another optimizer, or damaged; on every rank.
    """
    state, world = context.state, context.world
    initialise_state(state.optimizer)
    saved, same_mesh = manifest.state["optimizer"], manifest.state["mesh"] == dict(world.plan.degrees)

    def planned() -> OptimizerPlan:
        try:
            with damaged("the optimizer"):
                return plan_restore(
                    state.parts, state.optimizer, saved, manifest.tensors, excluded, same_mesh, unfreezes=changes.frozen
                )
        except Unsaveable as error:
            raise UserError.one(error.name, error.why) from None
        except ValueError as error:
            raise UserError.one(str(found.folder), f"its optimizer state is damaged: {error}") from None

    plan, _ = on_all_ranks(planned, world)
    assert plan is not None
    names = {name for names in world.gather(list(parameter_names(state.parts).values())) for name in names}
    gone = [f"{OPTIMIZER}.{name}" for name in saved["parameters"] if name not in names]
    problems = [f"{name} is not in this job" for name in gone if not matches(name, excluded)]
    of_all_ranks = [problem for of_rank in world.gather(plan.problems) for problem in of_rank]
    problems = list(dict.fromkeys(of_all_ranks + problems))
    if problems:
        state.optimizer.state.clear()
        raise _another_optimizer(found.folder, problems)
    if changes.frozen:
        _log_frozen(context, plan, saved["parameters"])
    return plan


def _log_frozen(context: CheckpointContext[CheckpointSection], plan: OptimizerPlan, saved: Collection[str]) -> None:
    """Log how many parameters are no longer frozen, and how many are now. Collective: a rank may have only some of them."""
    parts = context.state.parts
    frozen = [name for tensor, name in parameter_names(parts).items() if not tensor.requires_grad and name in saved]
    found = context.world.gather((sorted(plan.fresh), frozen))
    fresh, gone = ({name for of_rank in found for name in of_rank[which]} for which in (0, 1))
    log.info(
        "training.freeze has changed: %d parameters are no longer frozen and start with fresh optimizer state; the state of "
        "%d that are frozen now is dropped",
        len(fresh),
        len(gone),
    )


def _apply(
    context: CheckpointContext[CheckpointSection],
    manifest: Manifest,
    optimizer: OptimizerPlan,
    attempt: Attempt,
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
    """Call :func:`~titan_ckpt.contents.tensors.require_patterns_match` with the names in the checkpoint and in the job.

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
