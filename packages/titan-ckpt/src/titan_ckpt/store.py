"""A run's checkpoints: where they are, and when one is due (TorchTitan paper, section 2.3)."""

from __future__ import annotations

from titan_ckpt.config import CheckpointSection
from titan_ckpt.folder import Folder
from titan_ckpt.optimizer_trial import try_optimizer
from titan_ckpt.plain_values import Unsaveable
from titan_ckpt.restoring import restore
from titan_ckpt.saving import Saving, unsaveable
from titan_ckpt.schedule_state import schedule_state
from titan_core.api.checkpoint import CheckpointContext
from titan_core.api.errors import UserError
from titan_core.api.sections import TrainingSection


class Store:
    """A :class:`~titan_core.api.checkpoint.CheckpointStore`."""

    def __init__(self, context: CheckpointContext[CheckpointSection]) -> None:
        self._context = context
        self._section = context.section
        self._folder = checkpoint_folder(context.job.dump_folder, self._section.folder)
        self._saving = Saving(context, self._folder)
        self._require_writable()
        self._compared = False

    def restore(self) -> None:
        """See :func:`~titan_ckpt.restoring.restore`."""
        self._saving.observers_tensors()  # what cannot be saved cannot be loaded either
        restored = restore(self._context, self._folder, self._saving.built)
        self._saving.newest, self._saving.inherited = restored.step, restored.inherited
        if restored.step is None and self._context.facts.section(TrainingSection).stop_at_step != 0:
            self._require_saveable()

    def after_step(self, last: bool, asked: bool) -> None:
        """See :class:`~titan_core.api.checkpoint.CheckpointStore`."""
        self._saving.report_finished()
        if not self._compared:  # the first step shows what differs; not hours later the first checkpoint
            self._compared = True
            self._saving.require_alike()
        step = self._context.state.step
        first = self._section.enable_first_step_checkpoint and step == 1
        if not (last or asked or first or step % self._section.interval == 0):
            return
        self._context.lifecycle.flush(step)
        self._saving.finish_pending()
        if last and self._saving.newest == step:
            return  # it was saved before the data turned out to have ended
        self._saving.save(last)

    def before_update(self) -> None:
        """See :class:`~titan_core.api.checkpoint.CheckpointStore`."""
        self._saving.wait_for_copy()

    def close(self) -> None:
        """See :class:`~titan_core.api.checkpoint.CheckpointStore`."""
        self._saving.close()

    def _require_saveable(self) -> None:
        """Find out before the first step, not at the first checkpoint, whether everything that is kept can be saved.

        Raises:
            UserError: something cannot; on every rank.
        """
        mistake = None
        try:
            try_optimizer(self._context)
        except Unsaveable as error:
            mistake = unsaveable(error)
        self._context.world.raise_together(mistake)
        self._saving.require_alike()
        try:
            schedule_state(self._context.state.lr_scheduler, self._context.world)
        except Unsaveable as error:
            raise unsaveable(error) from None

    def _require_writable(self) -> None:
        """Find out before training, not after its first interval, and hold a local folder against other jobs: it may lie
        outside of the run's directory.

        Raises:
            UserError: on every rank.
        """

        def probe() -> str:
            try:
                self._folder.make()
                self._folder.write(".writable", b"")
                self._folder.remove(".writable")
                if (path := self._folder.local_path) is not None:
                    self._context.hold(path, f"checkpoints in {self._folder}")
            except UserError:
                raise
            except Exception as error:  # noqa: BLE001 - a storage of fsspec's may raise anything, a missing package first
                return getattr(error, "strerror", None) or str(error)
            return ""

        problem = self._context.world.on_first_rank(probe)
        if problem:
            raise UserError.one(str(self._folder), f"cannot be written: {problem}", "set checkpoint.folder to another place")


def checkpoint_folder(dump_folder: str, folder: str) -> Folder:
    """Where a run's checkpoints are."""
    return Folder(folder) if "://" in folder or folder.startswith("/") else Folder(dump_folder) / folder
