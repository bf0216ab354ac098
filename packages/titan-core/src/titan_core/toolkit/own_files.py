"""Writing and removing in folders that may contain links which somebody else has made: what a link leads to is neither
written nor removed. Free of torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

from titan_core.api import UserError


def no_link(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file, unless it is a link. An opener for :func:`open`."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def remove_tree(path: Path) -> None:
    """Remove a folder with its contents, a file or a link, if there is one. No link is followed, not even one that takes the
    place of a folder meanwhile.

    Raises:
        OSError: something cannot be removed.
    """
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Remove the files ``names`` of ``folder``, and folders of these names, as far as they exist.

    Raises:
        OSError: one cannot be removed, or the folder is a link.
    """
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISDIR(os.stat(name, dir_fd=opened, follow_symlinks=False).st_mode):
                    shutil.rmtree(name, dir_fd=opened)
                else:
                    os.unlink(name, dir_fd=opened)
    finally:
        os.close(opened)


def require_inside(folder: Path, names: Iterable[str], contents: bool = True) -> None:
    """Require that no link leads out of ``folder`` at ``names`` in it, and below them no link to a folder. A name that is an
    absolute path is the user's own choice. Links to files further below are not Titan's: W&B makes some.

    Args:
        contents: whether to look below the names too.

    Raises:
        UserError: a link does. Titan would write, move or remove files that are not the folder's own.
    """
    real = folder.resolve()
    for name in names:
        below = os.walk(real / name) if contents else ()
        links = (
            os.path.join(root, entry)
            for root, folders, files in below
            for entry in (*folders, *(files if root == str(real / name) else ()))
        )
        for path in (os.path.normpath(real / name), *filter(os.path.islink, links)):
            leads_to = Path(path).resolve()
            if str(leads_to) != path and not os.path.isabs(name) and not leads_to.is_relative_to(real):
                why = f"is a link to {leads_to}, and Titan writes and removes files only in the folder itself"
                fix = "remove the link, or set the key that names the folder (such as checkpoint.folder) to where it leads"
                raise UserError.one(str(folder / os.path.relpath(path, real)), why, fix)
