"""Additional checkpoints of the newest step, in the memory (``/dev/shm``) or on a disk of the machine that all ranks run on.

They have the format of other checkpoints and are verified like them, but only the newest one is kept, until a durable one is
newer. A job that a launcher restarted resumes from it. A job that a person starts again resumes from the durable one, and so
does not depend on what an earlier job has left on the machine: each start by a person gets an ID, kept beside the durable
checkpoints, and a local one counts only if it bears this ID.

Nothing is copied to other machines: if the ranks do not all see the folder, there are no local checkpoints.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

from titan_ckpt.catalogue import step_folder, steps_in
from titan_ckpt.config import CheckpointSection
from titan_ckpt.folder import Folder
from titan_ckpt.retention import remove
from titan_core.api.errors import UserError
from titan_core.api.launcher import RESTART
from titan_core.api.world import World

log = logging.getLogger(__name__)

_TOKEN = "token"
"""Name of a file by which ranks find out whether they see the same folder."""
_LAUNCH = "launch"
"""Name of a file with the ID of the start to which the checkpoints of a local folder belong."""
_CURRENT = ".launch"
"""Name of the file beside the durable checkpoints with the ID of the last start by a person."""


def restarted() -> bool:
    """Whether a launcher has restarted this job, after a failure or because machines joined or left."""
    return RESTART in os.environ or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


class LocalCheckpoints:
    """The local checkpoints of one run. All ranks must call the same methods in the same order."""

    def __init__(self, section: CheckpointSection, dump_folder: str, durable: Folder, world: World) -> None:
        """Make the folder, private to the user. Remove what an earlier job has left in it.

        Args:
            durable: the folder of the durable checkpoints, which can be written.

        Raises:
            UserError: the folder cannot be used; on every rank.
        """
        self._world = world
        run = hashlib.sha256(os.path.abspath(dump_folder).encode()).hexdigest()[:16]
        self._path = Path(section.local_folder) / f"titan-{run}"
        self.folder = Folder(str(self._path))

        def make() -> tuple[str, str]:
            """Return the problem with the folder, and a new token that it contains."""
            token, launch = uuid.uuid4().hex, _launch(durable)
            try:
                _make_private(self._path)
                (self._path / _TOKEN).write_text(token, encoding="utf-8")
                if _read(self._path / _LAUNCH) != launch:
                    self._remove(steps_in(self.folder))
                    (self._path / _LAUNCH).write_text(launch, encoding="utf-8")
            except OSError as error:
                return error.strerror or str(error), ""
            return "", token

        problem, token = world.on_first_rank(make)
        if problem:
            where = f"checkpoint.local_folder = {section.local_folder!r}"
            raise UserError.one(where, f"{self._path}: {problem}", "choose another folder")
        # Another machine may have a folder of this name, with the token of an earlier job.
        self.is_shared = all(world.gather(_read(self._path / _TOKEN) == token))
        """Whether all ranks see the folder."""
        if not self.is_shared:
            if os.environ.get("LOCAL_RANK", "0") == "0":
                self._remove_folder()  # an attempt that ran on this machine alone may have left checkpoints
            log.warning("no local checkpoints: not all ranks see %s, because they run on several machines", self._path)

    def newer_than(self, step: int) -> list[tuple[int, Folder]]:
        """Return the step and the folder of each checkpoint after ``step``, newest first."""
        steps = self._world.on_first_rank(lambda: [one for one in steps_in(self.folder) if one > step])
        return [(one, step_folder(self.folder, one)) for one in steps]

    def keep_only(self, step: int) -> None:
        """Remove all checkpoints but that of ``step``, which is complete."""
        self._world.on_first_rank(lambda: self._remove([other for other in steps_in(self.folder) if other != step]))

    def remove_all(self, last: bool) -> None:
        """Remove all checkpoints, because a durable one is newer, or none can be used.

        Args:
            last: whether to remove the folder as well.
        """

        def clear() -> None:
            self._remove(steps_in(self.folder))
            if last:
                self._remove_folder()

        self._world.on_first_rank(clear)

    def _remove_folder(self) -> None:
        """Remove the whole folder. Only this class writes to it, and only the user can."""
        with suppress(OSError):
            _make_private(self._path)
            shutil.rmtree(self._path)

    def _remove(self, steps: list[int]) -> None:
        try:
            for step in steps:
                remove(self.folder, step)
        except OSError as error:
            log.warning("old checkpoints in %s cannot be removed: %s", self.folder, error.strerror or error)


def _launch(durable: Folder) -> str:
    """Return the ID of the last start by a person: a new one, unless a launcher has restarted this job."""
    if restarted() and _CURRENT in durable.list():
        return durable.read(_CURRENT).decode(errors="replace")
    new = uuid.uuid4().hex
    durable.write(_CURRENT, new.encode())
    return new


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _make_private(path: Path) -> None:
    """Make a folder to which only the user can write: ``/dev/shm`` is open to all users.

    Raises:
        OSError: it cannot be made, belongs to another user, or others can write to it.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022 or path.is_symlink():
        raise PermissionError(13, "it belongs to another user, or others can write to it")
