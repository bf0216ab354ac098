"""When a run saves and restores checkpoints, and where they are (TorchTitan paper, section 2.3)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from titan_ckpt.config import CheckpointSection
from titan_ckpt.contents.optimizer_state import try_optimizer
from titan_ckpt.contents.plain_values import Unsaveable
from titan_ckpt.contents.state import schedule_state
from titan_ckpt.contents.tensors import model_tensors
from titan_ckpt.format.catalogue import checkpoint_folder, step_folder
from titan_ckpt.resume.restoring import restore
from titan_ckpt.save.saving import Saving, unsaveable
from titan_core.api import CheckpointContext, UserError
from titan_core.api.config.sections import TrainingSection
from titan_core.toolkit.own_files import require_inside

if TYPE_CHECKING:
    from titan_ckpt.save.exports import Exports


class Store:
    """Implements :class:`~titan_core.api.CheckpointStore`."""

    def __init__(self, context: CheckpointContext[CheckpointSection]) -> None:
        self._context = context
        self._section = context.section
        self._folder = checkpoint_folder(context.job.dump_folder, self._section.folder)
        self._require_writable()
        self._exports = self._open_exports()
        self._saving = Saving(context, self._folder, self._exports)
        self._compared = False

    def restore(self) -> bool:
        """See :func:`~titan_ckpt.resume.restoring.restore`."""
        self._saving.observer_tensors()  # raises for tensors that cannot be saved, and so cannot be loaded into
        restored = restore(self._context, self._folder, self._saving.built)
        self._saving.newest, self._saving.inherited = restored.step, restored.inherited
        if restored.step is None and self._context.job.section(TrainingSection).stop_at_step != 0:
            self._require_saveable()
        self._begin_exports(restored.step)
        return restored.step is not None

    def after_step(self, last: bool, requested: bool) -> None:
        """See :class:`~titan_core.api.CheckpointStore`."""
        self._saving.report_finished()
        self._saving.advance_exports()
        if not self._compared:  # report differences after the first step, not hours later at the first checkpoint
            self._compared = True
            self._saving.require_equal_on_ranks()
        step = self._context.state.step
        first = self._section.enable_first_step_checkpoint and step == 1
        if not (last or requested or first or step % self._section.interval == 0):
            return
        self._context.lifecycle.flush(step)
        self._saving.finish_pending()
        if last and self._saving.newest == step:
            return  # already saved before the end of the data was reached
        self._saving.save(last)

    @property
    def newest(self) -> tuple[int, str] | None:
        """See :class:`~titan_core.api.CheckpointStore`."""
        step = self._saving.newest
        return None if step is None else (step, str(step_folder(self._folder, step)))

    def before_update(self) -> None:
        """See :class:`~titan_core.api.CheckpointStore`."""
        self._saving.wait_for_copy()

    def close(self) -> None:
        """See :class:`~titan_core.api.CheckpointStore`."""
        try:
            self._saving.close()
        finally:
            job = self._context.job
            stop = job.section(TrainingSection).stop_at_step
            self._saving.close_exports(self._context.state.step < min(job.end_step, job.end_step if stop is None else stop))

    def _open_exports(self) -> Exports | None:
        """Return the exports of the run's checkpoints, on rank 0 if there are any.

        Raises:
            UserError: their folder cannot be written; on every rank.
        """
        if self._section.export is None:
            return None
        from titan_ckpt.save.exports import Exports

        found, mistake = None, None
        if self._context.world.rank == 0:
            try:
                found = Exports(self._context)
            except UserError as error:
                mistake = error
        self._context.world.raise_together(mistake)
        return found

    def _begin_exports(self, step: int | None) -> None:
        """Check before the first step that checkpoints can be exported, and export the one that the run resumes from if it
        is not.

        Args:
            step: step of that checkpoint.

        Raises:
            UserError: the checkpoints cannot be exported; on every rank.
        """
        if self._section.export is None:
            return
        from titan_ckpt.save.exports import require_exportable

        require_exportable(self._context, model_tensors(self._context.state.parts), self._saving.about())
        if self._exports is not None and step is not None:
            self._exports.add_missing(step, step_folder(self._folder, step))

    def _require_saveable(self) -> None:
        """Check before the first step, not at the first checkpoint, that the whole state can be saved.

        Raises:
            UserError: part of the state cannot be saved; on every rank.
        """
        mistake = None
        try:
            try_optimizer(self._context)
        except Unsaveable as error:
            mistake = unsaveable(error)
        self._context.world.raise_together(mistake)
        self._saving.require_equal_on_ranks()
        try:
            schedule_state(self._context.state.lr_scheduler, self._context.world)
        except Unsaveable as error:
            raise unsaveable(error) from None

    def _require_writable(self) -> None:
        """Check before training that the folder can be written. Lock a local folder against other jobs, because it may be
        outside the run's directory.

        Raises:
            UserError: the folder cannot be written, or another job has locked it; on every rank.
        """

        def probe() -> str:
            try:
                require_inside(Path(self._context.job.dump_folder), [self._section.folder], contents=False)
                self._folder.make()
                self._folder.write(".writable", b"")
                (self._folder / ".writable").remove_all()
                if (path := self._folder.local_path) is not None:
                    self._context.lock_folder(path, f"checkpoints in {self._folder}")
            except UserError:
                raise
            except Exception as error:  # noqa: BLE001 - fsspec backends raise any type, e.g. ImportError for a missing package
                return getattr(error, "strerror", None) or str(error)
            return ""

        problem = self._context.world.on_first_rank(probe)
        if problem:
            raise UserError.one(
                str(self._folder), f"cannot be written: {problem}", "set checkpoint.folder to another location"
            )
