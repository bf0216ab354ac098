"""Local plain text: files are divided into pieces of some 32 KiB at ends of lines, and each piece is a document, so that
one large file can feed any number of logical shards."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from titan_core.data.local_files import find_files
from titan_core.data.shuffled import ShuffledDocuments
from titan_core.data.source import DatasetRequest, DocumentSource
from titan_core.errors import UserError

PIECE = 32 * 1024


class TextPieces:
    """Byte ranges of files."""

    def __init__(self, files: list[Path]) -> None:
        self._pieces = [(file, start, end) for file in files for start, end in _pieces(file)]

    def __len__(self) -> int:
        return len(self._pieces)

    def text(self, index: int) -> str:
        """The piece's text.

        Raises:
            UserError: its bytes are not UTF-8.
        """
        file, start, end = self._pieces[index]
        with file.open("rb") as stream:
            stream.seek(start)
            content = stream.read(end - start)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError.one(
                f"{file}", f"not UTF-8 text: {error.reason} at byte {start + error.start}", "convert the file to UTF-8"
            ) from None


def open_text(request: DatasetRequest) -> DocumentSource:
    """The text files of ``training.dataset_path``."""
    return ShuffledDocuments(TextPieces(find_files(request, (".txt", ".text", ".md"))), request.seed)


def _pieces(file: Path) -> list[tuple[int, int]]:
    size = file.stat().st_size
    cuts = [0]
    with file.open("rb") as stream:
        while size - cuts[-1] > PIECE:
            stream.seek(cuts[-1] + PIECE)
            stream.readline()
            cuts.append(stream.tell())
    if cuts[-1] < size:
        cuts.append(size)
    return list(pairwise(cuts))
