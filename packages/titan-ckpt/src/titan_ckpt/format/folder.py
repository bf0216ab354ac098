"""Local folders and folders at URLs that fsspec supports. Local files are made durable with fsync."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from titan_core.toolkit.files import open_file, read_bytes
from titan_core.toolkit.own_files import no_link, remove_files, remove_tree

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


LONGEST: Final = 256 * 2**20
"""Bytes of a file that is read whole: a manifest has about 120 for each data file."""


def write_all(file: IO[bytes], data: memoryview) -> None:
    """Write all of ``data``. One ``write`` to an unbuffered file may write only part of it, e.g. on a disk that fills up."""
    written = 0
    while written < len(data):
        written += file.write(data[written:])


_FLUSH_BYTES = 64 * 2**20


class _FlushedEarly:
    """Syncs a file to disk in the background while it is being written, instead of all at once at the end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None
        self._bytes = 0

    def __enter__(self) -> _FlushedEarly:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()

    def wrote(self, num_bytes: int) -> None:
        """Record that ``num_bytes`` more bytes were written."""
        self._bytes += num_bytes
        if self._bytes >= _FLUSH_BYTES and (self._pending is None or self._pending.done()):
            self.finish()
            self._pending = self._thread.submit(os.fsync, self._descriptor)
            self._bytes = 0

    def finish(self) -> None:
        """Wait for the background sync, and raise its error if it failed."""
        if self._pending is not None:
            self._pending.result()


@dataclass(frozen=True)
class _Watched:
    file: IO[bytes]
    early: _FlushedEarly

    def write(self, data: bytes | memoryview) -> int:
        """Write ``data`` and return the number of bytes written."""
        written = self.file.write(data)
        self.early.wrote(written)
        return written


@dataclass(frozen=True)
class Folder:
    """A folder at ``url``: a path or ``protocol://...``."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> Folder:
        return Folder(f"{self.url.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> Folder:
        """The folder that contains this one."""
        return Folder(self.url.rstrip("/").rpartition("/")[0] or ".")

    @property
    def is_local(self) -> bool:
        """Whether the folder is on a file system of this machine."""
        return "://" not in self.url or self.url.startswith("file://")

    @property
    def is_link(self) -> bool:
        """Whether this is a link to a folder, on a file system of this machine."""
        return self.is_local and os.path.islink(self.located[1])

    @property
    def local_path(self) -> Path | None:
        """Path of the folder, or ``None`` if it is not on a file system of this machine."""
        return Path(self.located[1]) if self.is_local else None

    @cached_property
    def located(self) -> tuple[AbstractFileSystem, str]:
        """The file system, and the folder's path in it."""
        import fsspec

        system, path = fsspec.core.url_to_fs(self.url)
        return system, path

    def make(self) -> None:
        """Make the folder and its parents."""
        system, path = self.located
        system.makedirs(path, exist_ok=True)

    def list(self) -> list[str]:
        """Return the sorted names of the folder's entries; empty if it does not exist or is a file."""
        system, path = self.located
        system.invalidate_cache()
        try:
            found = system.ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of each file in the folder, by name, without those of links."""
        system, path = self.located
        if self.is_local:
            with os.scandir(path) as found:
                return {one.name: one.stat().st_size for one in found if one.is_file(follow_symlinks=False)}
        system.invalidate_cache()
        found = system.ls(path, detail=True)
        return {str(one["name"]).rpartition("/")[2]: one["size"] for one in found if one["type"] == "file"}

    def size(self, name: str) -> int | None:
        """Return the size of the file ``name`` in bytes, or ``None`` if it does not exist."""
        system, path = (self / name).located
        try:
            return int(system.size(path))
        except FileNotFoundError:
            return None

    def read(self, name: str, longest: int = LONGEST) -> bytes:
        """Return the contents of the file ``name``.

        Raises:
            OSError: it is no regular file, or longer than ``longest``.
        """
        system, path = (self / name).located
        data = read_bytes(path, longest=longest) if self.is_local else system.cat_file(path)
        assert isinstance(data, bytes)
        return data

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """Open the file ``name`` for random-access reads."""
        system, path = (self / name).located
        with open_file(path) if self.is_local else system.open(path, "rb") as file:
            yield file

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """Create the file ``name``. It is durable once the context exits without an error."""
        system, path = (self / name).located
        if not self.is_local:
            with system.open(path, "wb") as file:
                yield file
            return
        with open(path, "wb", buffering=0, opener=no_link) as file, _FlushedEarly(file.fileno()) as early:
            yield _Watched(file, early)  # type: ignore[misc]
            early.finish()
            os.fsync(file.fileno())

    def write(self, name: str, data: bytes) -> None:
        """Write ``data`` to the file ``name`` atomically."""
        if not self.is_local:
            system, path = (self / name).located
            system.pipe_file(path, data)
            return
        with self.create(f"{name}.new") as file:
            write_all(file, memoryview(data))
        _, path = (self / name).located
        os.replace(f"{path}.new", path)
        self.sync()

    def sync(self) -> None:
        """Make the folder's entries, and its own entry in its parent, durable."""
        if self.is_local:
            for path in (self.located[1], os.path.dirname(self.located[1])):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def rename(self, name: str) -> None:
        """Rename the folder within its parent."""
        system, path = self.located
        system.mv(path, f"{path.rpartition('/')[0]}/{name}", recursive=True)

    def remove(self, *names: str) -> None:
        """Remove the files and folders ``names``, as far as they exist.

        Raises:
            OSError: one cannot be removed, or this is a link to a folder.
        """
        system, path = self.located
        if self.is_local:
            remove_files(Path(path), names)
            return
        for name in names:
            with suppress(FileNotFoundError):
                system.rm(f"{path}/{name}", recursive=True)

    def remove_all(self) -> None:
        """Remove the folder and its contents."""
        system, path = self.located
        try:
            if self.is_local:
                remove_tree(Path(path))
            else:
                system.rm(path, recursive=True)
        except FileNotFoundError:
            return
