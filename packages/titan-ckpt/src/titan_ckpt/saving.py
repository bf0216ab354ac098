"""Writing checkpoints, at once or beside training."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from titan_ckpt import state as plain
from titan_ckpt.catalogue import step_folder
from titan_ckpt.comparing import resolved
from titan_ckpt.config import CheckpointSection
from titan_ckpt.config_changes import decisive_keys
from titan_ckpt.dtypes import overflows
from titan_ckpt.folder import Folder
from titan_ckpt.optimizer_state import OptimizerState, group_values, parameter_names, state_of
from titan_ckpt.plain_values import Unsaveable
from titan_ckpt.replicas import ONE_IS_KEPT, require_alike
from titan_ckpt.retention import Retention, make_room
from titan_ckpt.staging import Staging
from titan_ckpt.tensors import buffer_names, by_copy, local, model_tensors, observers_tensors
from titan_ckpt.token_ids import token_ids
from titan_ckpt.writer import Writer
from titan_core.api.checkpoint import CheckpointContext
from titan_core.api.errors import UserError
from titan_core.api.sections import TrainingSection

log = logging.getLogger(__name__)


class Saving:
    """Writes a run's checkpoints into ``folder``. All ranks call the same methods in the same order."""

    def __init__(self, context: CheckpointContext[CheckpointSection], folder: Folder) -> None:
        self._context, self._section, self._folder = context, context.section, folder
        self._job, self._world, self._state = context.job, context.world, context.state
        self._asynchronous = self._section.async_mode != "disabled"
        # A save beside training must not mix its messages with training's.
        self._group = self._world.new_background_group() if self._asynchronous else None
        self._staging = self._make_staging()
        self._retention = Retention(folder, self._section.keep_latest_k, self._section.keep_every_n_steps)
        self._pending: tuple[int, Future[None]] | None = None
        self._beside = ThreadPoolExecutor(1, "checkpoint")
        self._copied = threading.Event()
        self.newest: int | None = None
        """Step of the newest whole checkpoint that this run has made or begun from."""
        self.inherited: dict[str, Any] = {}
        """What checkpoints say of where the run's first weights came from."""
        self.built = self._built()
        """The values of parameter groups as the config builds them."""

    def _built(self) -> list[dict[str, Any]]:
        try:
            return group_values(self._state.optimizer)
        except Unsaveable as error:
            raise unsaveable(error) from None

    def save(self, last: bool) -> None:
        """Save the state: beside training if the config says so, unless it is the ``last`` one.

        Raises:
            UserError: the last one could not be written; or something cannot be saved at all.
        """
        step = self._state.step
        exported = last and self._section.last_save_model_only and step >= self._job.config.section(TrainingSection).steps
        weights_only = exported or step == 0  # the optimizer has no state yet
        tensors = model_tensors(self._state.parts)
        # The next forward pass may change buffers, and an observer its tensors, before the update waits for the copy of all
        # else.
        unguarded = set(buffer_names(self._state.parts))
        if exported:
            tensors = self._exported(tensors)
        values: dict[str, Any] = {}
        if not weights_only:
            optimizer = self._optimizer_state()
            tensors |= optimizer.tensors
            kept = self.observers_tensors()
            tensors |= kept
            unguarded |= kept.keys()
            try:
                values = plain.collect(self._context, optimizer)
            except Unsaveable as error:  # all ranks know of it
                raise unsaveable(error) from None
        self.require_alike()
        folder = step_folder(self._folder, step)
        # What an interrupted save of the same step has left, or a run that was restarted from before it.
        self._clear(step)
        writer = Writer(folder, self._world.rank, step, self._about(), values)
        if not self._asynchronous or last:
            try:
                save(by_copy(tensors, self._world), storage_writer=writer)
            except CheckpointException as error:
                self._failed(step, error, last)
            else:
                self._committed(step)
            return
        tensors |= {name: tensors[name].clone() for name in unguarded & tensors.keys()}
        self._copied.clear()
        self._pending = (step, self._beside.submit(self._save_beside, by_copy(tensors, self._world), writer))

    def _exported(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """``tensors`` in the type of an export; as they are where that does not hold their values."""
        dtype = getattr(torch, self._section.export_dtype)
        exported = {name: one.to(dtype) if one.is_floating_point() else one for name, one in tensors.items()}
        mine = [
            name for name, one in exported.items() if one.is_floating_point() and overflows(local(tensors[name]), local(one))
        ]
        beyond = sorted({name for of_rank in self._world.gather(mine) for name in of_rank})
        if not beyond:
            return exported
        log.error(
            "%s has values beyond checkpoint.export_dtype = %r: the weights are saved as they are", beyond[0],
            self._section.export_dtype,
        )  # fmt: skip
        return tensors

    def require_alike(self) -> None:
        """Hold buffers, and whatever else each rank has whole, against the other ranks'.

        Raises:
            UserError: one is not the same on all ranks; on every rank.
        """
        tensors = by_copy(model_tensors(self._state.parts) | self.observers_tensors(), self._world)
        try:
            require_alike(tensors, self._world)
        except Unsaveable as error:
            raise UserError.one(error.name, error.why, ONE_IS_KEPT) from None

    def observers_tensors(self) -> dict[str, Tensor]:
        """What observers keep.

        Raises:
            UserError: some of it cannot be saved; on every rank.
        """
        found: dict[str, Tensor] = {}
        mistake = None
        try:
            found = observers_tensors(self._context.lifecycle)
        except Unsaveable as error:
            mistake = unsaveable(error)
        self._world.raise_together(mistake)
        return found

    def _optimizer_state(self) -> OptimizerState:
        """What this rank's optimizer keeps.

        Raises:
            UserError: something of it cannot be saved; on every rank.
        """
        found, mistake = OptimizerState(), None
        try:
            found = state_of(parameter_names(self._state.parts), self._state.optimizer, self.built)
        except Unsaveable as error:
            mistake = unsaveable(error)
        self._world.raise_together(mistake)
        return found

    def _save_beside(self, tensors: dict[str, Tensor], writer: Writer) -> None:
        """In a thread of its own: copy, which must be done before the next update, and write the copy."""
        copies: dict[str, Tensor] = {}
        try:
            copies = self._staging.copy(tensors)
        except (RuntimeError, MemoryError) as error:
            writer.give_up(error)  # reported to the other ranks by the save, which all have to take part in
        finally:
            self._copied.set()
        save(copies, storage_writer=writer, process_group=self._group)

    def wait_for_copy(self) -> None:
        """Wait for the copy that a save beside training writes from. It was made during forward and backward."""
        if self._pending is not None:
            self._copied.wait()

    def report_finished(self) -> None:
        """Say that a save beside training is done, on all ranks after the same step."""
        if self._pending is None:
            return
        done = torch.tensor(int(self._pending[1].done()))
        if int(self._world.sum(done)) == self._world.size:
            self.finish_pending()

    def finish_pending(self) -> None:
        """Wait for a save that still runs beside training."""
        if self._pending is None:
            return
        step, future = self._pending
        self._pending = None
        try:
            future.result()
        except CheckpointException as error:
            self._failed(step, error, last=False)
        else:
            self._committed(step)

    def _committed(self, step: int) -> None:
        """A checkpoint is complete: report it, and remove those that are not to be kept any longer."""
        self.newest = step
        folder = step_folder(self._folder, step)
        log.info("saved %s", folder)
        self._context.lifecycle.checkpoint_saved(step, str(folder))

        def prune() -> None:
            try:
                self._retention.prune(step)
            except OSError as error:
                log.warning("old checkpoints in %s cannot be removed: %s", self._folder, error.strerror or error)

        self._world.on_first_rank(prune)

    def _clear(self, step: int) -> None:
        """Remove what there is of a step's checkpoint, or move it aside. If that fails, so does the save, which says so."""

        def clear() -> None:
            try:
                aside = make_room(self._folder, step)
            except OSError as error:
                log.warning("%s cannot be removed: %s", step_folder(self._folder, step), error.strerror or error)
            else:
                if aside is not None:
                    log.warning("%s was no whole checkpoint; moved to %s", step_folder(self._folder, step), aside)

        self._world.on_first_rank(clear)

    def _failed(self, step: int, error: CheckpointException, last: bool) -> None:
        """A checkpoint could not be written. Training continues, unless this was its last chance.

        Raises:
            UserError: it was.
        """
        rank, failure = next(iter(error.failures.items()))
        reason = failure[0] if isinstance(failure, tuple) else failure
        if not isinstance(reason, OSError | MemoryError | torch.OutOfMemoryError):
            raise error
        self._clear(step)  # it takes room, and is of no use
        newest = "there is none yet" if self.newest is None else f"the newest is that of step {self.newest}"
        why = f"cannot be written (rank {rank}: {getattr(reason, 'strerror', None) or reason})"
        if last:
            raise UserError.one(str(step_folder(self._folder, step)), why, f"{newest}; make room and start the job again")
        log.error("checkpoint of step %d %s; training continues, %s", step, why, newest)

    def close(self) -> None:
        """Wait for what is still being written, and for no other rank: after an error they may be elsewhere."""
        if self._pending is not None:
            step, future = self._pending
            self._pending = None
            error = future.exception()
            if error is not None:
                log.error("checkpoint of step %d could not be completed: %s", step, error)
        self._beside.shutdown()

    def _about(self) -> dict[str, Any]:
        return {
            **self.inherited,
            "model": self._job.name,
            "model_name": self._job.model.name,
            **resolved(self._job),
            "decisive": decisive_keys(self._job.config),
            "tokenizer": token_ids(self._job.text_tokenizer),
            "mesh": {name: degree for name, degree in self._world.plan.degrees.items() if degree > 1},
            "world_size": self._world.size,
            "diverging_replicas": self._world.plan.diverging_replicas,
            "torch": torch.__version__,
            **self._job.identity(),
        }

    def _make_staging(self) -> Staging:
        pinned = self._section.async_mode == "async_with_pinned_mem"
        if pinned and self._world.device.type != "cuda":
            key = "checkpoint.async_mode"
            raise UserError(self._job.config.problem(key, "pinned memory is for copies from a GPU", 'set it to "async"'))
        return Staging(self._world.device, pinned)


def unsaveable(error: Unsaveable) -> UserError:
    """What a user is to know of it."""
    return UserError.one(error.name, f"{error.why}: a resumed run would not have it", "keep plain values and tensors")
