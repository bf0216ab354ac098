"""The embedded corpus: source text of Python's standard library. Real text on every machine, without a network."""

from __future__ import annotations

import os
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from titan_core.api import DatasetContext, DocumentSource, Problem

_EXCLUDED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib-dynload"}


class StandardLibrary:
    """The corpus; each source file is a document."""

    def __init__(self, root: Path) -> None:
        self.files = sorted(_source_files(root))

    def __len__(self) -> int:
        return len(self.files)

    def text(self, index: int) -> str:
        """Return the text of file ``index``, decoded like Python source."""
        with tokenize.open(self.files[index]) as file:
            return file.read()

    def place(self, index: int) -> str:
        """Return the path of file ``index``."""
        return str(self.files[index])

    def find(self, place: str) -> int | None:
        """Return the number of the file at ``place``, which may be relative to the library."""
        return next((number for number, file in enumerate(self.files) if file in (Path(place), _root() / place)), None)


def _source_files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _EXCLUDED]  # site-packages may be large
        yield from (Path(folder, name) for name in files if name.endswith(".py") and name not in _EXCLUDED)


def open_stdlib(context: DatasetContext[None]) -> DocumentSource:
    """Open the corpus of the running Python."""
    from titan_core.api import ShuffledDocuments  # needs numpy; the check below does not

    library = StandardLibrary(_root())
    return ShuffledDocuments(library, context.seed, library.files, context.shuffle)


def check_stdlib(context: DatasetContext[None]) -> list[Problem]:
    """Check that the library's source exists, unlike in a frozen or zipped Python, and that no path is set."""
    if not (_root() / "argparse.py").is_file():
        return [Problem("dataset 'stdlib'", f"{_root()} contains no source text", "set training.dataset to another dataset")]
    if context.path is not None:
        return [Problem(context.where, "dataset 'stdlib' takes no path", 'set training.dataset = "text" or "json"')]
    return []


def _root() -> Path:
    return Path(sysconfig.get_path("stdlib"))
