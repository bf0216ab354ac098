"""Contents of local and remote files, as pyarrow reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow

from titan_data.remote_bytes import RemoteBytes


class ReadFailed(Exception):
    """Bytes of a store could not be fetched. No ``OSError``, which the library raises for damaged files too."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class FetchedRanges:
    """A remote file of which some ranges are here."""

    def __init__(self, content: RemoteBytes, ranges: Sequence[tuple[int, int]]) -> None:
        """
        Raises:
            ReadFailed: they cannot be fetched.
        """
        self._content = content
        self._parts: list[tuple[int, bytes]] = []
        self._parts = [(begin, self[begin:end]) for begin, end in ranges]

    def __len__(self) -> int:
        return len(self._content)

    def __getitem__(self, index: slice) -> bytes:
        """Return consecutive bytes.

        Raises:
            ReadFailed: they cannot be fetched.
        """
        begin, end, _ = index.indices(len(self))
        for first, part in self._parts:
            if first <= begin <= end <= first + len(part):
                return bytes(part[begin - first : end - first])
        try:
            found: bytes = self._content[begin:end]
        except OSError as error:
            raise ReadFailed(error) from error
        return found


def seekable(content: Any) -> Any:
    """Return the contents of a file as libraries read them: a buffer, or a stream that fetches what is read."""
    if isinstance(content, RemoteBytes | FetchedRanges):
        return pyarrow.PythonFile(_Stream(content), "r")
    return pyarrow.BufferReader(pyarrow.py_buffer(content))


@dataclass
class _Stream:
    """A remote file, as a Python file."""

    content: RemoteBytes | FetchedRanges
    at: int = 0
    closed: bool = field(default=False, init=False)

    def read(self, size: int = -1) -> bytes:
        end = len(self.content) if size < 0 else min(self.at + size, len(self.content))
        try:
            found: bytes = self.content[self.at : end]
        except OSError as error:
            raise ReadFailed(error) from error
        self.at = max(self.at, end)
        return found

    def seek(self, at: int, whence: int = 0) -> int:
        self.at = at + (0, self.at, len(self.content))[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def close(self) -> None:
        self.closed = True
