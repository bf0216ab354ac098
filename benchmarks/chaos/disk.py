"""A small file system for the job's checkpoints, which can be filled."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
from pathlib import Path

SIZE_MIB = 64
_CLONE_NEWNS = 0x20000
_PIECE = 2**20


def mount(folder: Path) -> str:
    """Mount a file system in memory at ``folder``. Only this process and those that it starts see it, and it goes with the
    last of them, unless :func:`unmount` removes it. Return why that is not possible, or ``""``."""
    folder.mkdir(parents=True, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        return f"a mount namespace is not permitted here ({os.strerror(ctypes.get_errno())})"
    # Without the first, the mount would appear in the namespace that this process came from.
    for command in (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "chaos", str(folder)],
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return "there is no command `mount`"
        if done.returncode:
            return f"mounting is not permitted here ({done.stderr.strip()})"
    return ""


def unmount(folder: Path) -> None:
    """Remove what :func:`mount` has mounted, and all files in it."""
    if folder.is_mount():
        subprocess.run(["umount", str(folder)], check=True)


class Ballast:
    """A file that fills its file system."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "ballast"

    def fill(self) -> None:
        """Write until not a byte is free."""
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        size = _PIECE
        try:
            while size:
                try:
                    os.write(descriptor, bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size //= 2
        finally:
            os.close(descriptor)

    def free(self) -> None:
        """Make room."""
        self._file.unlink(missing_ok=True)
