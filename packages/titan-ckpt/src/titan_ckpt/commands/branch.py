"""``titan run branch``: a run of its own that begins with the whole state of another run after a step, such as a decay of
the learning rate, branched off a long run. Does not import torch."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from titan_ckpt.config import CheckpointSection
from titan_ckpt.format.catalogue import checkpoint_folder, entries, entry, step_folder, steps_in
from titan_ckpt.format.folder import LONGEST, Folder, write_all
from titan_ckpt.format.manifest import read_manifest
from titan_ckpt.format.new_folder import new_folder, require_new
from titan_ckpt.format.stored import NAME, UNFINISHED, BrokenCheckpoint, Manifest
from titan_ckpt.format.tokenizer_files import stored_files, write_files
from titan_ckpt.resume.config_changes import config_changes
from titan_core.api import CommandContext, Config, Problem, UserError
from titan_core.api.config.numbers import MOST_STEPS
from titan_core.api.config.resolved import Override
from titan_core.api.config.secrets import redact
from titan_core.api.config.sections import TrainingSection
from titan_core.toolkit.arguments import integer
from titan_core.toolkit.files import LONGEST_TABLE, read_bytes
from titan_core.toolkit.json_lines import LineFile
from titan_core.toolkit.launching import shell_command
from titan_core.toolkit.runs.files import CONFIG, EVENTS, EXCLUDED
from titan_core.toolkit.runs.run_log import RunLog
from titan_core.toolkit.text import print_notes, say

_ARGS = "model.args"
_OWN: Mapping[str, object] = {
    "checkpoint.enable": "true",
    "checkpoint.load_step": -1,
    "checkpoint.initial_load_path": "none",
    "checkpoint.exclude_from_loading": "[]",
}
"""Settings of every branch: it begins with its copy of the checkpoint, and resumes from its own."""
_BLOCK = 16 * 2**20


def arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan run branch``."""
    parser.add_argument("run", metavar="RUN", help="directory of the run to branch off, which may be running")
    steps = integer(1, MOST_STEPS)
    parser.add_argument("--at", type=steps, required=True, metavar="STEP", help="step of the checkpoint to begin with")
    parser.add_argument("--to", metavar="FOLDER", help="new directory of the branch (default: RUN-at-STEP)")


def run(context: CommandContext) -> int:
    """Write the directory of the branch: its config, its copy of the checkpoint, and its origin.

    Raises:
        UserError: ``RUN`` has no such checkpoint, the directory is not new, or the settings do not fit.
    """
    parent, step = Path(context.arguments.run), context.arguments.at
    target = Path(context.arguments.to or f"{os.path.normpath(parent)}-at-{step}")
    source, manifest = _checkpoint(parent, step)
    require_new(target, checkpoint=False)
    context.arguments.recipe = str(parent / CONFIG)
    changed = context.config()
    _require_free(changed)
    values = {**_OWN, "job.dump_folder": target, "checkpoint.allow_changed": json.dumps(_allowed(changed, manifest))}
    stop = changed.section(TrainingSection).stop_at_step
    if stop is not None and stop <= step and "training.stop_at_step" not in changed.overridden:
        values["training.stop_at_step"] = "none"  # where the other run stopped
    job = context.job(more=[Override(key, str(value)) for key, value in values.items()], missing_ok=True)
    _require_steps(job.config, step)
    with new_folder(target) as partial:
        copy = step_folder(_new_checkpoints(job.config, partial), step)
        try:
            copy_checkpoint(source, manifest, copy)
        except (BrokenCheckpoint, FileNotFoundError) as error:
            copy.remove_all()
            fix = "branch off another step (`titan checkpoint list`), or let the run keep more (checkpoint.keep_latest_k)"
            raise UserError.one(str(source), f"was removed or changed while it was copied: {error}", fix) from None
        (partial / CONFIG).write_text(tomli_w.dumps(redact(job.run_config.tables())), encoding="utf-8")
        if (parent / EXCLUDED).exists():  # documents that the run passes over
            (partial / EXCLUDED).write_bytes(read_bytes(parent / EXCLUDED, longest=LONGEST_TABLE, inside=parent))
        log = LineFile(partial / EVENTS)
        origin = os.path.relpath(parent.resolve(), target.resolve())
        log.append({"event": "branch", "time": time.time(), "step": step, "parent": origin})
        log.close()
    settings = ", ".join(sorted(changed.overridden)) or "the same settings"
    say(f"wrote {target}: begins after step {step} of {parent}, with {settings}")
    print_notes(job.notes)
    say(f"train it: {shell_command(['train', str(target / CONFIG)])}")
    return 0


def _checkpoint(parent: Path, step: int) -> tuple[Folder, Manifest]:
    """Return the checkpoint of ``step`` of the run at ``parent``.

    Raises:
        UserError: it is no run, or has no such checkpoint with the state of a run.
    """
    config: Mapping[str, Any] = RunLog.read_config(parent)
    if not config:
        raise UserError.one(f"run {str(parent)!r}", f"has no {CONFIG}", "pass a run's directory (job.dump_folder)")
    section = config.get("checkpoint")
    named = section.get("folder") if isinstance(section, Mapping) else None
    folder = checkpoint_folder(str(parent), named if isinstance(named, str) else "checkpoint")
    if step not in steps_in(folder):
        saved = [found.step for found in entries(folder) if found.manifest is not None and not found.manifest.model_only]
        listed = f"saved: {', '.join(map(str, reversed(saved)))}" if saved else "it has none"
        raise UserError.one(f"--at {step}", f"{folder} has no checkpoint of this step; {listed}", "choose a saved step")
    found = entry(step_folder(folder, step), step)
    if found.manifest is None:
        raise UserError.one(str(found.folder), found.problem, "choose another step (`titan checkpoint list`)")
    if found.manifest.model_only:
        why = "contains only weights, so no run can continue from it"
        raise UserError.one(str(found.folder), why, "start a new run from it: set checkpoint.initial_load_path")
    return found.folder, found.manifest


def _require_free(config: Config) -> None:
    """Require that no override sets what the branch itself sets."""
    fixes = {"job.dump_folder": "use --to FOLDER"}
    keys = [key for key in (*_OWN, "job.dump_folder") if key in config.overridden]
    if keys:
        why = "is set by `titan run branch`"
        raise UserError(*(Problem(config.where(key), why, fixes.get(key, "remove it")) for key in keys))


def _allowed(config: Config, manifest: Manifest) -> list[str]:
    """Return ``checkpoint.allow_changed`` of the branch: what it allows itself, and the overridden keys that decide what is
    trained. Anything else that differs is refused when the branch starts, as when a run resumes."""
    about = manifest.about
    changes = config_changes(about.get("config", {}), about.get("decisive", ()), config)
    decisive = [change.key for change in changes if change.decisive]
    allowed = [key for key in decisive if any(one == key or one.startswith(f"{key}.") for one in config.overridden)]
    of_model = [
        key if key != _ARGS else f"{_ARGS}.*" for key in sorted(config.overridden) if f"{key}.".startswith(f"{_ARGS}.")
    ]
    of_data = any(key == "data.mixture" or key.startswith("training.dataset") for key in config.overridden)
    data = ["data.mixture", "dataset.*.weight"] if of_data else []
    return list(dict.fromkeys([*config.section(CheckpointSection).allow_changed, *allowed, *of_model, *data]))


def _require_steps(config: Config, step: int) -> None:
    """Require steps to train after ``step``."""
    section = config.section(TrainingSection)
    for key, value in (("training.steps", section.steps), ("training.stop_at_step", section.stop_at_step)):
        if value is not None and value <= step:
            why = f"the branch begins after step {step}, so there is nothing to train"
            raise UserError(config.problem(key, why, f"add --{key} N, with N above {step}"))


def _new_checkpoints(config: Config, partial: Path) -> Folder:
    """Return the folder of the branch's checkpoints while its directory is ``partial``.

    Raises:
        UserError: it is outside of the directory, and not empty.
    """
    checkpoints = checkpoint_folder(str(partial), config.section(CheckpointSection).folder)
    if checkpoints.list():
        why = "is not empty: a branch needs a folder of its own"
        fix = "add --checkpoint.folder checkpoint, for one in the branch's directory, or name a new one"
        raise UserError(config.problem("checkpoint.folder", why, fix))
    return checkpoints


def copy_checkpoint(source: Folder, manifest: Manifest, target: Folder) -> None:
    """Copy the checkpoint in ``source`` to the new folder ``target``. Its files never change, so files on one file system
    become hard links, which take no space. The manifest comes last, as when a checkpoint is saved.

    Args:
        manifest: that of ``source``.

    Raises:
        OSError: a file cannot be read or written.
        BrokenCheckpoint: the copy is not whole, because files of ``source`` were changed or removed meanwhile.
    """
    target.make()
    target.write(UNFINISHED, b"")
    for name in manifest.files:
        if not _linked(source, target, name):
            _copy(source, target, name)
    write_files(target, stored_files(source, manifest))
    if target.is_local:
        target.sync()
    target.write(NAME, source.read(NAME, max(LONGEST, source.size(NAME) or 0)))  # it has been read before
    target.remove(UNFINISHED)
    read_manifest(target)


def _linked(source: Folder, target: Folder, name: str) -> bool:
    """Make a hard link, and return whether both folders are on one file system that has them."""
    old, new = source.local_path, target.local_path
    if old is None or new is None:
        return False
    try:
        os.link(old / name, new / name)
    except FileNotFoundError:
        raise
    except OSError:  # other file systems, and those without links, differ in the error
        return False
    return True


def _copy(source: Folder, target: Folder, name: str) -> None:
    with source.open(name) as old, target.create(name) as new:
        while block := old.read(_BLOCK):
            write_all(new, memoryview(block))
