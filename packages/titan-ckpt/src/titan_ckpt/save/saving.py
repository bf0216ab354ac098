"""Saving checkpoints, synchronously or in the background."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from titan_ckpt.config import CheckpointSection
from titan_ckpt.contents import state as plain
from titan_ckpt.contents.optimizer_state import OptimizerState, group_values, parameter_names, state_of
from titan_ckpt.contents.plain_values import Unsaveable
from titan_ckpt.contents.tensors import (
    MAKE_EQUAL,
    buffer_names,
    in_export_dtype,
    model_tensors,
    observer_tensors,
    require_equal_on_ranks,
    with_replica_prefix,
)
from titan_ckpt.format.catalogue import step_folder
from titan_ckpt.format.folder import Folder
from titan_ckpt.format.manifest import paused_gc
from titan_ckpt.format.tokenizer_files import MAIN, files_at
from titan_ckpt.format.writer import Writer
from titan_ckpt.resume.comparing import about_run
from titan_ckpt.save.retention import Retention, make_room
from titan_ckpt.save.staging import Snapshot, Staging
from titan_core.api import CheckpointContext, UserError
from titan_core.api.config.sections import ModelSection, TrainingSection
from titan_core.toolkit.errors import caused_by_peer

if TYPE_CHECKING:
    from titan_ckpt.save.exports import Exports

INTERRUPTED_SECONDS = 10.0
"""How long a run that stops before its last step waits for an export. A launcher kills ranks that take long to stop."""
LOST_SECONDS = 5.0
"""How long a rank that has lost another one waits for its background save. The save may be complete but for the manifest; if
it needs the lost rank, it does not end before the timeout of its group, which is long."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Pending:
    """A save in the background."""

    step: int
    snapshot: Snapshot
    writer: Writer
    future: Future[None]


class Saving:
    """Saves a run's checkpoints in ``folder``. All ranks must call the same methods in the same order."""

    def __init__(
        self, context: CheckpointContext[CheckpointSection], folder: Folder, exports: Exports | None = None
    ) -> None:
        """
        Args:
            exports: of the checkpoints, on rank 0 if there are any.
        """
        self._exports = exports
        self._context, self._section, self._folder = context, context.section, folder
        self._job, self._world, self._state = context.job, context.world, context.state
        self._asynchronous = self._section.async_mode != "disabled"
        # Collectives of a background save need their own group, so that they do not interleave with those of training.
        self._group = self._world.new_background_group() if self._asynchronous else None
        self._staging = self._make_staging()
        self._retention = Retention(folder, self._section.keep_latest_k, self._section.keep_every_n_steps)
        self._pending: _Pending | None = None
        self.newest: int | None = None
        """Step of the newest complete checkpoint that this run has saved or resumed from."""
        self._tokenizer: Mapping[str, bytes] = {}
        self._world.on_first_rank(self._read_tokenizer)
        self.inherited: dict[str, Any] = {}
        """Entries of a manifest's ``about`` that describe the origin of the run's initial weights."""
        self.built = self._built()
        """Values of the parameter groups as built from the config."""

    def _built(self) -> list[dict[str, Any]]:
        try:
            return group_values(self._state.optimizer)
        except Unsaveable as error:
            raise unsaveable(error) from None

    def _read_tokenizer(self) -> None:
        """Read the tokenizer's files, which every checkpoint contains.

        Raises:
            UserError: one cannot be read, or leads out of its folder.
        """
        path = self._job.section(ModelSection).tokenizer_path
        self._tokenizer = {} if path is None else files_at(Path(path).expanduser())
        if path is not None and not self._tokenizer:
            where = self._job.config.where("model.tokenizer_path", path)
            log.warning("%s: checkpoints do not contain this tokenizer: none of its files is %s", where, " or ".join(MAIN))

    def about(self) -> dict[str, Any]:
        """Return :attr:`~titan_ckpt.format.stored.Manifest.about` of the run's checkpoints."""
        return {**self._state.origin, **self.inherited, **about_run(self._job, self._world)}

    def save(self, last: bool) -> None:
        """Save the state, in the background if the config says so and this is not the ``last`` save.

        Raises:
            UserError: part of the state cannot be saved, or the last save failed.
        """
        step = self._state.step
        exported = last and self._section.last_save_model_only and step >= self._job.config.section(TrainingSection).steps
        weights_only = exported or step == 0  # the optimizer has no state yet
        tensors = model_tensors(self._state.parts)
        # The update waits until everything is copied. But buffers and observers' tensors may change earlier, in the next
        # forward pass.
        unguarded = set(buffer_names(self._state.parts))
        if exported:
            tensors = in_export_dtype(tensors, self._section.export_dtype, self._world)
        values: dict[str, Any] = {}
        if not weights_only:
            optimizer = self._optimizer_state()
            tensors |= optimizer.tensors
            observed = self.observer_tensors()
            tensors |= observed
            unguarded |= observed.keys()
            try:
                values = plain.collect(self._context, optimizer)
            except Unsaveable as error:  # raised on every rank
                raise unsaveable(error) from None
        self.require_equal_on_ranks()
        folder = step_folder(self._folder, step)
        # The step may have a folder already: from an interrupted save, or from before the run resumed from an older step.
        self._clear(step)
        writer = Writer(folder, self._world.rank, step, self.about(), values, self._tokenizer)
        if not self._asynchronous or last:
            try:
                with paused_gc():  # a save in the background runs while training has switched collections off
                    writer.save(with_replica_prefix(tensors, self._world))
            except CheckpointException as error:
                self._failed(step, error, last)
            else:
                self._after_commit(step)
            return
        tensors |= {name: tensors[name].clone() for name in unguarded & tensors.keys()}
        snapshot = self._staging.snapshot(with_replica_prefix(tensors, self._world))
        future = _in_background(lambda: self._save_in_background(snapshot, writer))
        self._pending = _Pending(step, snapshot, writer, future)

    def require_equal_on_ranks(self) -> None:
        """Require buffers and all other replicated tensors to be equal on all ranks.

        Raises:
            UserError: a tensor differs between ranks; on every rank.
        """
        tensors = with_replica_prefix(model_tensors(self._state.parts) | self.observer_tensors(), self._world)
        try:
            require_equal_on_ranks(tensors, self._world)
        except Unsaveable as error:
            raise UserError.one(error.name, f"{error.why}, but a checkpoint contains only one copy", MAKE_EQUAL) from None

    def observer_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that observers save.

        Raises:
            UserError: a tensor cannot be saved; on every rank.
        """
        found: dict[str, Tensor] = {}
        mistake = None
        try:
            found = observer_tensors(self._context.lifecycle)
        except Unsaveable as error:
            mistake = unsaveable(error)
        self._world.raise_together(mistake)
        return found

    def _optimizer_state(self) -> OptimizerState:
        """Return the state of this rank's optimizer.

        Raises:
            UserError: part of the state cannot be saved; on every rank.
        """
        found, mistake = OptimizerState(), None
        try:
            found = state_of(parameter_names(self._state.parts), self._state.optimizer, self.built)
        except Unsaveable as error:
            mistake = unsaveable(error)
        self._world.raise_together(mistake)
        return found

    def _save_in_background(self, snapshot: Snapshot, writer: Writer) -> None:
        """Copy the tensors, which the next update waits for, and write the copies. Runs in the background thread."""
        copies: dict[str, Tensor] = {}
        try:
            copies = snapshot.copy()
        except (RuntimeError, MemoryError) as error:
            writer.give_up(error)  # the save is collective, and reports the error to the other ranks
        writer.save(copies, self._group)

    def wait_for_copy(self) -> None:
        """Make the update that follows wait until the background save has copied its tensors to the host. The copy overlaps
        forward and backward. On a GPU with pinned memory, the device waits and the host does not."""
        if self._pending is not None:
            self._pending.snapshot.before_update()

    def report_finished(self) -> None:
        """Finish the background save if it is done on all ranks. All ranks finish it after the same step."""
        if self._pending is None:
            return
        done = torch.tensor(int(self._pending.future.done()))
        if int(self._world.sum(done)) == self._world.size:
            self.finish_pending()

    def finish_pending(self) -> None:
        """Wait for the background save, if one is running."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.future.result()
        except CheckpointException as error:
            self._failed(pending.step, error, last=False)
        else:
            self._after_commit(pending.step)

    def _after_commit(self, step: int) -> None:
        """Report a complete checkpoint, and remove the checkpoints that the retention policy no longer keeps."""
        self.newest = step
        folder = step_folder(self._folder, step)
        log.info("saved %s", folder)
        self._context.lifecycle.checkpoint_saved(step, str(folder))
        if self._exports is not None:
            self._exports.add(step, folder)
        self._world.on_first_rank(self._prune)

    def _prune(self) -> None:
        assert self.newest is not None
        try:
            self._retention.prune(self.newest, () if self._exports is None else self._exports.in_use)
        except OSError as error:
            log.warning("old checkpoints in %s cannot be removed: %s", self._folder, error.strerror or error)

    def advance_exports(self) -> None:
        """Report the export that has ended, start the next one, and remove checkpoints that were kept for them."""
        if self._exports is not None and self._exports.advance():
            self._prune()

    def close_exports(self, interrupted: bool) -> None:
        """Wait for the exports, except after an error.

        Args:
            interrupted: whether the run stops before its last step, and must not take long.
        """
        if self._exports is None:
            return
        if sys.exception() is not None:
            self._exports.abandon()
            return
        self._exports.wait(INTERRUPTED_SECONDS if interrupted else None)
        if self.newest is not None:
            self._prune()

    def _clear(self, step: int) -> None:
        """Remove or move aside an existing folder of ``step``. Logs a failure, after which the save fails too."""

        def clear() -> None:
            try:
                aside = make_room(self._folder, step)
                if self._exports is not None:
                    self._exports.discard(step)
            except OSError as error:
                log.warning("%s cannot be removed: %s", step_folder(self._folder, step), error.strerror or error)
            else:
                if aside is not None:
                    log.warning("%s is not a complete checkpoint; moved to %s", step_folder(self._folder, step), aside)

        self._world.on_first_rank(clear)

    def _failed(self, step: int, error: CheckpointException, last: bool) -> None:
        """Log a save that failed.

        Raises:
            UserError: the save was the last one, so that training cannot continue.
            CheckpointException: the cause is not a lack of memory or an ``OSError``.
        """
        rank, failure = next(iter(error.failures.items()))
        reason = failure[0] if isinstance(failure, tuple) else failure
        if not isinstance(reason, OSError | MemoryError | torch.OutOfMemoryError):
            raise error
        self._clear(step)  # a partial checkpoint is useless, and takes space
        newest = "there is no checkpoint yet" if self.newest is None else f"the newest checkpoint is of step {self.newest}"
        why = f"cannot be written (rank {rank}: {getattr(reason, 'strerror', None) or reason})"
        if last:
            raise UserError.one(str(step_folder(self._folder, step)), why, f"make space and start the job again ({newest})")
        log.error("checkpoint of step %d %s; training continues; %s", step, why, newest)
        self._context.lifecycle.checkpoint_failed(self._state.step, f"step {step} {why}; {newest}")

    def close(self) -> None:
        """Wait until this rank's background save ends, but for no other rank: after an error, others may not get here. If
        the error that ends the run (the exception being handled) is the loss of another rank, abandon a save that waits for
        that rank."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        failure = sys.exception()
        wait([pending.future], LOST_SECONDS if failure is not None and caused_by_peer(failure) else None)
        if not pending.future.done():
            pending.writer.give_up(RuntimeError("another rank is lost"))
            log.error("checkpoint of step %d is abandoned: it waits for another rank, which is lost", pending.step)
        elif error := pending.future.exception():
            log.error("checkpoint of step %d could not be completed: %s", pending.step, error)

    def _make_staging(self) -> Staging:
        pinned = self._section.async_mode == "async_with_pinned_mem"
        if pinned and self._world.device.type != "cuda":
            key = "checkpoint.async_mode"
            raise UserError(self._job.config.problem(key, "pinned memory requires a CUDA device", 'set it to "async"'))
        return Staging(self._world.device, pinned)


def _in_background(work: Callable[[], None]) -> Future[None]:
    """Run ``work`` in a thread that the process does not wait for when it ends (it would, for those of an executor)."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised by the future
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future


def unsaveable(error: Unsaveable) -> UserError:
    """Convert ``error`` to an error for the user."""
    why = f"{error.why}, so a resumed run could not restore it"
    return UserError.one(error.name, why, "keep state as plain values, DTensors, or tensors that are equal on all ranks")
