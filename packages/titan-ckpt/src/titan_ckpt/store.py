"""A run's checkpoints: where they are, and when one is due (TorchTitan paper, section 2.3)."""

from __future__ import annotations

from titan_ckpt.config import CheckpointSection
from titan_ckpt.folder import Folder
from titan_ckpt.restoring import restore
from titan_ckpt.saving import Saving
from titan_core.errors import UserError
from titan_core.train.checkpoint import CheckpointRequest


def build(request: CheckpointRequest) -> Store:
    """The checkpoints of a run."""
    return Store(request)


class Store:
    """A :class:`~titan_core.train.checkpoint.CheckpointStore`."""

    def __init__(self, request: CheckpointRequest) -> None:
        self._request = request
        self._section = request.job.config.section(CheckpointSection)
        self._folder = checkpoint_folder(request.job.dump_folder, self._section.folder)
        self._saving = Saving(request, self._section, self._folder)
        self._require_writable()

    def restore(self) -> None:
        """See :func:`~titan_ckpt.restoring.restore`."""
        self._saving.newest = restore(self._request, self._section, self._folder)

    def after_step(self, last: bool, asked: bool) -> None:
        """See :class:`~titan_core.train.checkpoint.CheckpointStore`."""
        self._saving.report_finished()
        step = self._request.state.step
        first = self._section.enable_first_step_checkpoint and step == 1
        if not (last or asked or first or step % self._section.interval == 0):
            return
        self._request.lifecycle.settle(step)
        self._saving.finish_pending()
        if last and self._saving.newest == step:
            return  # it was saved before the data turned out to have ended
        self._saving.save(last)

    def before_update(self) -> None:
        """See :class:`~titan_core.train.checkpoint.CheckpointStore`."""
        self._saving.wait_for_copy()

    def close(self) -> None:
        """See :class:`~titan_core.train.checkpoint.CheckpointStore`."""
        self._saving.close()

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
                    self._request.hold(path, f"checkpoints in {self._folder}")
            except UserError:
                raise
            except Exception as error:  # noqa: BLE001 - a storage of fsspec's may raise anything, a missing package first
                return getattr(error, "strerror", None) or str(error)
            return ""

        problem = self._request.world.on_first_rank(probe)
        if problem:
            raise UserError.one(str(self._folder), f"cannot be written: {problem}", "set checkpoint.folder to another place")


def checkpoint_folder(dump_folder: str, folder: str) -> Folder:
    """Where a run's checkpoints are."""
    return Folder(folder) if "://" in folder or folder.startswith("/") else Folder(dump_folder) / folder
