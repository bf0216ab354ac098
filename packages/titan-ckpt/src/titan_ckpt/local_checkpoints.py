"""Additional checkpoints of the newest step, in the memory (``/dev/shm``) or on a disk of the machine that all ranks run on.

They have the format of other checkpoints and are verified like them, but only the newest one is kept, until a durable one is
newer. A job that a launcher restarted resumes from it. A job that a person starts again resumes from the durable one, and so
does not depend on what an earlier job has left on the machine: each start by a person gets a random ID, kept beside the
durable checkpoints, which names the local folder. Other users of the machine cannot guess it, and so not make it first.

Nothing is copied to other machines: if the ranks do not all see the folder, there are no local checkpoints.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from titan_ckpt.catalogue import step_folder, steps_in
from titan_ckpt.config import CheckpointSection
from titan_ckpt.folder import Folder
from titan_ckpt.retention import remove
from titan_core.api import UserError, World
from titan_core.toolkit.launching import RESTART

log = logging.getLogger(__name__)

_ID = re.compile(r"[0-9a-f]{32}")
"""A random ID. A folder with another name is not touched."""

_TOKEN = "token"
"""Name of a file by which ranks find out whether they see the same folder."""
_CURRENT = ".launch"
"""Name of the file beside the durable checkpoints with the ID of the last start by a person."""


def restarted() -> bool:
    """Whether a launcher has restarted this job, after a failure or because machines joined or left."""
    return RESTART in os.environ or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


class LocalCheckpoints:
    """The local checkpoints of one run. All ranks must call the same methods in the same order."""

    def __init__(self, section: CheckpointSection, durable: Folder, world: World) -> None:
        """Make the folder, private to the user. Remove that of an earlier start.

        Args:
            durable: the folder of the durable checkpoints, which can be written.

        Raises:
            UserError: the folder cannot be used; on every rank.
        """
        self._world = world
        place = Path(section.local_folder)

        def make() -> tuple[str, str, str]:
            """Return the problem with the folder, its name, and a new token that it contains."""
            token = secrets.token_hex(16)
            launch, before = _launch(durable)
            try:
                if before:
                    _remove_folder(place / f"titan-{before}")
                _make_private(place / f"titan-{launch}", exists=restarted())
                (place / f"titan-{launch}" / _TOKEN).write_text(token, encoding="utf-8")
            except OSError as error:
                return f"{place / f'titan-{launch}'}: {error.strerror or error}", "", ""
            return "", f"titan-{launch}", token

        problem, name, token = world.on_first_rank(make)
        if problem:
            where = f"checkpoint.local_folder = {section.local_folder!r}"
            raise UserError.one(where, problem, "choose another folder")
        self._path = place / name
        self.folder = Folder(str(self._path))
        # Another machine may have a folder of this name, with the token of an earlier job.
        self.is_shared = all(world.gather(_read(self._path / _TOKEN) == token))
        """Whether all ranks see the folder."""
        if not self.is_shared:
            if os.environ.get("LOCAL_RANK", "0") == "0":
                _remove_folder(self._path)  # an attempt that ran on this machine alone may have left checkpoints
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
                _remove_folder(self._path)

        self._world.on_first_rank(clear)

    def _remove(self, steps: list[int]) -> None:
        try:
            for step in steps:
                remove(self.folder, step)
        except OSError as error:
            log.warning("old checkpoints in %s cannot be removed: %s", self.folder, error.strerror or error)


def _launch(durable: Folder) -> tuple[str, str]:
    """Return the ID of the last start by a person, a new one unless a launcher has restarted this job; and the ID that a new
    one replaces, or an empty string."""
    before = durable.read(_CURRENT).decode(errors="replace") if _CURRENT in durable.list() else ""
    before = before if _ID.fullmatch(before) else ""
    if before and restarted():
        return before, ""
    new = secrets.token_hex(16)
    durable.write(_CURRENT, new.encode())
    return new, before


def _remove_folder(path: Path) -> None:
    """Remove the whole folder of a run. Only this module writes to it, and only the user can."""
    with suppress(OSError):
        _require_private(path)
        shutil.rmtree(path)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _make_private(path: Path, exists: bool) -> None:
    """Make a folder to which only the user can write: ``/dev/shm`` is open to all users.

    Args:
        exists: whether it may exist already: that of a restarted job does, on the same machine.

    Raises:
        OSError: it cannot be made, or :func:`_require_private` refuses the one that exists.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not exists:
            raise
    _require_private(path)


def _require_private(path: Path) -> None:
    """
    Raises:
        OSError: the folder does not exist, belongs to another user, or others can write to it.
    """
    found = path.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022 or path.is_symlink():
        raise PermissionError(13, "it belongs to another user, or others can write to it")
