"""Going on from a checkpoint: which one, whether it can be used, and loading it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from titan_ckpt import state as plain
from titan_ckpt.catalogue import Entry, entry, step_folder, steps_in
from titan_ckpt.config import CheckpointSection
from titan_ckpt.folder import Folder
from titan_ckpt.foreign_start import begin_from_foreign, foreign_kind
from titan_ckpt.manifest import BrokenCheckpoint, Manifest
from titan_ckpt.reader import Reader
from titan_ckpt.tensors import MODEL, begin_optimizer, forget_state, model_tensors, optimizer_tensors
from titan_core.errors import Problem, UserError
from titan_core.patterns import matches
from titan_core.train.checkpoint import CheckpointRequest

log = logging.getLogger(__name__)


def restore(request: CheckpointRequest, section: CheckpointSection, folder: Folder) -> int | None:
    """Go on from the newest whole checkpoint in ``folder``, or the one that the config names; without any, begin with the
    weights that it names.

    Returns:
        The step gone on from; ``None`` at a beginning.

    Raises:
        UserError: there are checkpoints, and none can be used.
    """
    world = request.world
    wanted = section.load_step
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        wanted = -1  # the launcher starts the job again after a failure: what it did since is not to be lost
    excluded = section.exclude_from_loading if wanted >= 0 else []
    candidates = [wanted] if wanted >= 0 else world.on_first_rank(lambda: steps_in(folder))
    problems: list[Problem] = []
    for step in candidates:
        found = world.on_first_rank(lambda step=step: entry(step_folder(folder, step), step))  # type: ignore[misc]
        problem = found.problem or _load(request, found, excluded)
        if not problem:
            if problems:
                log.warning("going on from step %d, not from the newest checkpoint", step)
            if wanted >= 0:
                _warn_of_later(request, folder, step)
            return step
        problems.append(Problem(str(found.folder), problem))
        log.warning("%s cannot be used: %s", found.folder, problem)
    # What was never complete is what an interrupted first save leaves: nothing was lost with it.
    if wanted >= 0 or any("not complete" not in problem.why for problem in problems):
        way_out = "set checkpoint.folder to another place to start anew, or mend what is said above"
        raise UserError(*problems, Problem(str(folder), "no checkpoint here can be used", way_out))
    if section.initial_load_path:
        _begin_from(request, section, section.initial_load_path)
    return None


def _warn_of_later(request: CheckpointRequest, folder: Folder, step: int) -> None:
    """Later checkpoints belong to what is being left, and would be taken first at the next start."""
    later = [one for one in request.world.on_first_rank(lambda: steps_in(folder)) if one > step]
    if later:
        log.warning(
            "%s has later checkpoints too, and a start without checkpoint.load_step takes the newest: "
            "`titan checkpoint rm %s --step %s` removes them",
            folder, folder, " ".join(map(str, reversed(later))),
        )  # fmt: skip


def _begin_from(request: CheckpointRequest, section: CheckpointSection, path: str) -> None:
    """Begin with weights from elsewhere: another run's, or in another format.

    Raises:
        UserError: there are none, or they are another model's.
    """
    excluded = section.exclude_from_loading
    kind = foreign_kind(request, path)
    if kind is not None:
        begin_from_foreign(request, Path(path), kind, excluded)
        return
    folder = Folder(path)
    found = request.world.on_first_rank(lambda: _entry_or_problem(folder))
    problem = found.problem or _load(request, found, excluded, weights_only=section.initial_load_model_only)
    if problem:
        where = request.job.config.where("checkpoint.initial_load_path", path)
        raise UserError.one(where, problem, "name the folder of a checkpoint, such as .../checkpoint/step-1000")


def _entry_or_problem(folder: Folder) -> Entry:
    """The checkpoint in ``folder``, whatever its storage may raise."""
    try:
        return entry(folder, 0)
    except Exception as error:  # noqa: BLE001 - a storage of fsspec's may raise anything, a missing package first
        return Entry(0, folder, None, getattr(error, "strerror", None) or str(error))


def _load(request: CheckpointRequest, found: Entry, excluded: list[str], weights_only: bool = False) -> str:
    """Load a checkpoint, but for what matches ``excluded``; why it could not be, if so. All ranks come to the same answer.

    Raises:
        UserError: it is whole, and of something else.
    """
    manifest, state = found.manifest, request.state
    assert manifest is not None
    weights_only = weights_only or (manifest.model_only and manifest.step == 0)  # the initial weights
    if manifest.model_only and not weights_only:
        return "it holds only weights, which a run cannot go on from (checkpoint.initial_load_path can begin with them)"
    tensors = model_tensors(state.parts)
    if not weights_only:
        begin_optimizer(state.optimizer)
        tensors |= optimizer_tensors(state.parts, state.optimizer)
    unwanted = {name for name in tensors if matches(name, excluded)}
    tensors = {name: one for name, one in tensors.items() if name not in unwanted}
    _require_same_tensors(request, found.folder, manifest, tensors, excluded)
    try:
        load(tensors, storage_reader=Reader(found.folder, manifest))
    except CheckpointException as error:
        reasons = [one[0] if isinstance(one, tuple) else one for one in error.failures.values()]
        if not all(isinstance(reason, BrokenCheckpoint | OSError) for reason in reasons):
            raise
        state.optimizer.state.clear()  # what was made to load into
        return str(reasons[0])
    forget_state(state.parts, state.optimizer, unwanted)
    if not weights_only:
        plain.apply(dict(manifest.state), request)
        log.info("going on after step %d from %s", manifest.step, found.folder)
    else:
        log.info("beginning with the weights of %s", found.folder)
    return ""


def _require_same_tensors(
    request: CheckpointRequest, folder: Folder, manifest: Manifest, tensors: Mapping[str, Tensor], excluded: list[str]
) -> None:
    """Names and shapes must be those of the checkpoint.

    Raises:
        UserError: on every rank, naming the first few that are not.
    """
    ours: dict[str, tuple[int, ...]] = {}
    for of_rank in request.world.gather({name: tuple(tensor.shape) for name, tensor in tensors.items()}):
        ours |= of_rank
    differences = [
        f"{name} is {list(manifest.tensors[name].shape)} there and {list(shape)} here"
        if name in manifest.tensors
        else f"{name} is not there"
        for name, shape in ours.items()
        if name not in manifest.tensors or manifest.tensors[name].shape != shape
    ]
    theirs = (name for name in manifest.tensors if name.startswith(f"{MODEL}."))
    differences += [f"{name} is not here" for name in theirs if name not in ours and not matches(name, excluded)]
    if differences:
        shown = "; ".join(differences[:3]) + (f"; and {len(differences) - 3} more" if len(differences) > 3 else "")
        there = manifest.about.get("model", "another model")
        raise UserError.one(
            str(folder),
            f"it is a checkpoint of {there}, and this job trains {request.job.name}: {shown}",
            "train that model, set checkpoint.folder to another place, or name what differs in "
            "checkpoint.exclude_from_loading",
        )
