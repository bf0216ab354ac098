"""Exports of a run's checkpoints to Hugging Face's format, in the background. Rank 0 makes them, from complete checkpoints:
no other rank waits, and nothing is kept in the memory of a rank."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from torch import Tensor

from titan_ckpt.config import CheckpointSection
from titan_ckpt.foreign.exporting import hf_tensors
from titan_ckpt.foreign.hf_export import export_config
from titan_ckpt.format.dtypes import dtype_name
from titan_ckpt.format.folder import Folder
from titan_ckpt.format.new_folder import PARTIAL
from titan_ckpt.save.export_process import ExportProcess
from titan_ckpt.save.retention import STEP, export_folder, exported_steps, target, to_remove
from titan_core.api import CheckpointContext, Problem, UserError
from titan_core.toolkit.own_files import remove_tree, require_inside
from titan_core.toolkit.status import phase

_REMOVED = ".removed"
_LEFTOVER = re.compile(rf"{STEP.pattern}({re.escape(PARTIAL)}|{re.escape(_REMOVED)})")
_LOCK = re.compile(rf"\.{STEP.pattern}\.lock")

log = logging.getLogger(__name__)


class Exports:
    """Makes one export at a time. If a run saves checkpoints faster than they are exported, the newest is exported next."""

    def __init__(self, context: CheckpointContext[CheckpointSection]) -> None:
        """Make the folder, lock it, and remove what an interrupted export or removal left there. If exports are pushed,
        require the hub to allow it.

        Raises:
            UserError: the folder cannot be written, another job is writing there, or exports cannot be pushed.
        """
        section = context.section
        require_inside(Path(context.job.dump_folder), [section.export_folder], contents=False)
        self.folder = export_folder(context)
        self._dtype, self._keep_latest = section.export_dtype, section.export_keep_latest_k
        self._running: ExportProcess | None = None
        self._next: tuple[int, Folder] | None = None
        self._warned: set[str] = set()
        where = f"checkpoint.export_folder = {section.export_folder!r}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            context.lock_folder(self.folder, where)
            self._remove_leftovers()
        except OSError as error:
            why = f"cannot be written: {error.strerror or error}"
            raise UserError.one(where, why, "set it to another location") from None
        self._push = section.export_push
        if self._push is not None:
            from titan_ckpt.foreign.hub_push import HubRepository

            HubRepository(self._push, "checkpoint.export_push").require_access()

    @property
    def in_use(self) -> set[int]:
        """Steps of the checkpoints that are being exported, or will be."""
        running = set() if self._running is None else {self._running.step}
        return running if self._next is None else running | {self._next[0]}

    def add(self, step: int, checkpoint: Folder) -> None:
        """Export the complete checkpoint of ``step`` as soon as no other export is running. To be called in the thread that
        trains, like all other methods."""
        if self._next is not None:
            log.info("step %d is not exported: exports take longer than the steps between checkpoints", self._next[0])
        self._next = step, checkpoint
        self.advance()

    def add_missing(self, step: int, checkpoint: Folder) -> None:
        """Export the checkpoint from which the run resumes, if it was interrupted before."""
        if not self._target(step).exists():
            self.add(step, checkpoint)

    def discard(self, step: int) -> None:
        """Remove the export of ``step``, whose checkpoint is about to be replaced.

        Raises:
            OSError: it cannot be removed.
        """
        own = self._target(step)
        if own.exists() or own.is_symlink():
            removed = own.with_name(own.name + _REMOVED)
            own.rename(removed)  # at no time are only some of its files there
            remove_tree(removed)

    def advance(self) -> bool:
        """Report the export that has ended, and start the next one. Return whether one has ended. Waits for nothing."""
        ended = self._running is not None and not self._running.is_running
        if ended:
            self._finish()
        if self._running is None and self._next is not None:
            (step, checkpoint), self._next = self._next, None
            try:
                self.discard(step)
                self._running = ExportProcess(step, checkpoint, self._target(step), self._dtype, self._push)
            except OSError as error:
                self._failed(step, error.strerror or str(error))
        return ended

    def wait(self, seconds: float | None) -> None:
        """Wait for the exports, in all for at most ``seconds``; for ``None`` as long as they take. Those that are not
        complete then are given up."""
        deadline = None if seconds is None else time.monotonic() + seconds
        with phase("exporting the last checkpoint"):
            while self._running is not None and self._running.wait(deadline and max(0.0, deadline - time.monotonic())):
                self.advance()
        if self._running is None:
            return
        complete = self._target(self._running.step)
        if self._next is None and complete.exists():
            self.abandon()
            upload = f"hf upload {self._push} {quote(str(complete))} ."
            log.warning("%s is not pushed, because the run was stopped; push it by `%s`", complete, upload)
            return
        self._next = self._next or (self._running.step, self._running.checkpoint)
        step, checkpoint = self._next
        self.abandon()
        log.warning(
            "step %d is not exported, because the run was stopped; it is when the run resumes, or by "
            "`titan checkpoint convert %s %s`", step, quote(str(checkpoint)), quote(str(self._target(step))),
        )  # fmt: skip

    def abandon(self) -> None:
        """Kill the process that is exporting, if any, and remove what it has written."""
        running, self._running, self._next = self._running, None, None
        if running is not None:
            running.end()
            self._remove_leftovers()

    def _target(self, step: int) -> Path:
        return target(self.folder, step)

    def _finish(self) -> None:
        assert self._running is not None
        running, self._running = self._running, None
        problem, warnings = running.end()
        for warning in warnings:
            if warning not in self._warned:  # the same at each checkpoint
                self._warned.add(warning)
                log.warning("export of step %d: %s", running.step, warning)
        complete = self._target(running.step)
        if not complete.exists():
            self._failed(running.step, problem)
            return
        if not running.checkpoint.list():  # set aside meanwhile: the run goes back before it
            self.discard(running.step)
            return
        log.info("exported %s", complete)
        if problem:
            log.warning("training continues: %s", problem)
        elif self._push is not None:
            log.info("pushed step %d to %s", running.step, self._push)
        try:
            self._prune(running.step)
        except OSError as error:
            log.warning("old exports in %s cannot be removed: %s", self.folder, error.strerror or error)

    def _failed(self, step: int, why: str) -> None:
        log.warning("step %d could not be exported; training continues: %s", step, why)

    def _prune(self, newest: int) -> None:
        """Remove old exports. Those of later steps are of an abandoned part of the run, as for checkpoints."""
        steps = exported_steps(self.folder)
        for step in to_remove([step for step in steps if step <= newest], self._keep_latest, 0):
            self.discard(step)

    def _remove_leftovers(self) -> None:
        for path in self.folder.iterdir():
            if _LEFTOVER.fullmatch(path.name) or _LOCK.fullmatch(path.name):
                remove_tree(path)


def require_exportable(
    context: CheckpointContext[CheckpointSection], tensors: Mapping[str, Tensor], about: Mapping[str, Any]
) -> None:
    """Require that the run's checkpoints can be exported. To be called on all ranks.

    Args:
        tensors: this rank's parameters and buffers, by their names in a checkpoint.
        about: see :class:`~titan_ckpt.format.stored.Manifest`.

    Raises:
        UserError: the format does not contain the whole model, or ``config.json`` cannot express it; on every rank.
    """
    job, world = context.job, context.world
    of_ranks = world.gather({name: dtype_name(tensor.dtype) for name, tensor in tensors.items()})

    def require() -> None:
        stored = {name: dtype for of_rank in of_ranks for name, dtype in of_rank.items()}
        form, _ = hf_tensors(job.family, job.model_args, stored)
        export_config(form, job.model_args, about, context.section.export_dtype)

    try:
        world.on_first_rank(require)
    except UserError as error:
        mistake = error.problems[0]
        why = f"its checkpoints cannot be exported: {mistake.where}: {mistake.why}"
        fix = "; or ".join(filter(None, ("remove the key", mistake.fix)))
        raise type(error)(Problem("checkpoint.export = 'hf'", why, fix)) from None
