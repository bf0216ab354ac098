"""Selecting the checkpoint that a run starts from."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from titan_ckpt.config import CheckpointSection
from titan_ckpt.foreign.config import hf_about, kind_of
from titan_ckpt.foreign.load import load_foreign
from titan_ckpt.format.catalogue import Entry, entry, pick, step_folder, steps_in
from titan_ckpt.format.folder import Folder
from titan_ckpt.format.manifest import paused_gc
from titan_ckpt.resume.loading import Attempt, load_checkpoint
from titan_ckpt.resume.position import restarted
from titan_core.api import CheckpointContext, Problem, UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """The state that a run starts from."""

    step: int | None
    """Step that the run resumes after; ``None`` for a new run."""
    inherited: dict[str, Any] = field(default_factory=dict)
    """Entries for ``about`` of the run's own checkpoints that describe the origin of its initial weights."""


@paused_gc()
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
    if world.on_first_rank(lambda: restarted(context.job)):
        wanted = -1  # keep the progress since load_step
    excluded = context.section.exclude_from_loading if wanted >= 0 else []
    if 0 <= wanted < context.job.first_step:  # an earlier stage has started from it
        wanted, excluded = context.job.first_step, []
    steps = [wanted] if wanted >= 0 else world.on_first_rank(lambda: steps_in(folder))
    problems: list[Problem] = []
    lost = False
    for step in steps:
        found = world.on_first_rank(lambda step=step: entry(step_folder(folder, step), step))  # type: ignore[misc]
        problem = found.problem or load_checkpoint(context, found, Attempt(found.folder, excluded, built))
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
    attempt = Attempt(found.folder, excluded, built)
    problem = found.problem or load_checkpoint(context, found, attempt, weights_only=context.section.initial_load_model_only)
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
