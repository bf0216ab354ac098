"""Local plain text. Files are cut at line ends into pieces of about 32 KiB, and each piece is a document, so that one large
file can feed any number of logical shards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from titan_core.api import CorruptRecord, DatasetContext, DocumentSource, ShuffledDocuments
from titan_data.compressed import decompressed
from titan_data.local_files import ENDINGS, find_files

PIECE = 32 * 1024


class TextPieces:
    """Byte ranges of text files."""

    def __init__(self, files: Sequence[Path], shown: Sequence[Path]) -> None:
        """
        Args:
            shown: names of the files in error messages. A decompressed copy has the name of the original.
        """
        named = zip(files, shown, strict=True)
        self._pieces = [(file, name, start, end) for file, name in named for start, end in _pieces(file)]

    def __len__(self) -> int:
        return len(self._pieces)

    def text(self, index: int) -> str:
        """Return the text of piece ``index``.

        Raises:
            CorruptRecord: its bytes are not UTF-8.
        """
        file, name, start, end = self._pieces[index]
        with file.open("rb") as stream:
            stream.seek(start)
            content = stream.read(end - start)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            why = f"not UTF-8 text: {error.reason} at byte {start + error.start}"
            raise CorruptRecord(str(name), why, "convert the file to UTF-8") from None


def open_text(context: DatasetContext[None]) -> DocumentSource:
    """Open the text files at ``training.dataset_path``."""
    files = find_files(context, ENDINGS["text"])
    plain = decompressed(files)
    return ShuffledDocuments(TextPieces(plain, files), context.seed, plain)


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
