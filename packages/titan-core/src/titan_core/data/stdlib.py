"""The embedded corpus: the Python standard library's own source text. Real text on every machine, without a network."""

from __future__ import annotations

import os
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from titan_core.api.dataset import DatasetContext, DocumentSource
from titan_core.api.errors import Problem

_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib-dynload"}


class StandardLibrary:
    """A document is a source file."""

    def __init__(self, root: Path) -> None:
        self.files = sorted(_source_files(root))

    def __len__(self) -> int:
        return len(self.files)

    def text(self, index: int) -> str:
        """The file's text, decoded as Python would."""
        with tokenize.open(self.files[index]) as file:
            return file.read()


def _source_files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]  # site-packages may be large
        yield from (Path(folder, name) for name in files if name.endswith(".py") and name not in _LEFT_OUT)


def open_stdlib(context: DatasetContext[None]) -> DocumentSource:
    """The corpus of the Python that runs this."""
    from titan_core.api.tools.shuffled import ShuffledDocuments  # numpy, which the check below can do without

    library = StandardLibrary(_root())
    return ShuffledDocuments(library, context.seed, library.files)


def check_stdlib(context: DatasetContext[None]) -> list[Problem]:
    """A Python without its library's source (a frozen or zipped one) has no such corpus."""
    if not (_root() / "argparse.py").is_file():
        return [Problem("dataset 'stdlib'", f"there is no source text in {_root()}", "set training.dataset")]
    if context.path is not None:
        return [Problem(context.where, "dataset 'stdlib' takes no path", 'set training.dataset = "text" or "json"')]
    return []


def _root() -> Path:
    return Path(sysconfig.get_path("stdlib"))
