"""Token ids in files of other tools: what their formats share, and the checks of their ids."""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy
from numpy.typing import NDArray

from titan_core.api import (
    CorruptRecord,
    DatasetContext,
    Document,
    DocumentSource,
    Problem,
    ShuffledDocuments,
    UserError,
    WeightedTokens,
)
from titan_core.toolkit.tokenizers import token_ids

OPEN: Final = 128
"""Maximum number of files that are mapped at the same time."""
_SAMPLED, _SAMPLE = 16, 1 << 12
"""Number of documents, and of tokens in each, whose ids are checked when a dataset is opened."""
UNRECORDED: Final = "the files do not record their tokenizer: the text below shows whether it is the recipe's"
TOKENIZER_FIX: Final = "set model.tokenizer and model.tokenizer_path to the tokenizer that made the data"


class Layout(Protocol):
    """Where the documents of an opened dataset are."""

    @property
    def files(self) -> Sequence[Path]:
        """All files, in order."""

    def __len__(self) -> int:
        """Return the number of documents."""

    def read(self, index: int) -> tuple[NDArray[Any] | WeightedTokens, str]:
        """Return document ``index`` and its place, for error messages.

        Raises:
            UserError: the index of the format is damaged there.
        """

    def describe(self) -> list[str]:
        """Return lines that say how the files are read."""


@dataclass(frozen=True)
class CheckedDocuments:
    """The documents of a layout; each id is checked against the vocabulary when it is read."""

    layout: Layout
    vocab_size: int | None
    """Exclusive upper limit of token ids; ``None``: there is no tokenizer to compare with."""

    def __len__(self) -> int:
        return len(self.layout)

    def text(self, index: int) -> Document:
        """Return document ``index``.

        Raises:
            CorruptRecord: an id is outside the vocabulary.
            UserError: the index of the format is damaged there.
        """
        document, place = self.layout.read(index)
        ids = document.ids if isinstance(document, WeightedTokens) else document
        if self.vocab_size is not None:
            try:
                token_ids(ids, self.vocab_size)
            except ValueError as error:
                raise CorruptRecord(place, str(error), TOKENIZER_FIX) from None
        return document

    def check_sample(self) -> None:
        """Check the ids of some documents between the first and the last.

        Raises:
            CorruptRecord: an id is outside the vocabulary.
            UserError: the index of the format is damaged.
        """
        if self.vocab_size is None or not len(self):
            return
        for index in sorted({number * (len(self) - 1) // (_SAMPLED - 1) for number in range(_SAMPLED)}):
            document, place = self.layout.read(index)
            ids = document.ids if isinstance(document, WeightedTokens) else document
            try:
                token_ids(ids[:_SAMPLE], self.vocab_size)
            except ValueError as error:
                raise CorruptRecord(place, str(error), TOKENIZER_FIX) from None


Opener = Callable[[DatasetContext[Any]], Layout]


def open_documents(context: DatasetContext[Any], layout: Layout) -> DocumentSource:
    """Return the documents of ``layout`` in random order.

    Raises:
        UserError: there is none.
    """
    if not len(layout):
        raise UserError.one(context.where, "the dataset contains no documents", "check the path")
    return ShuffledDocuments(CheckedDocuments(layout, context.vocab_size), context.seed, layout.files)


def check_documents(context: DatasetContext[Any], opened: Opener) -> list[Problem]:
    """Return what is wrong with the files, or with a sample of their ids."""
    try:
        layout = opened(context)
        if not len(layout):
            return [Problem(context.where, "the dataset contains no documents", "check the path")]
        if not context.skip_corrupt:
            CheckedDocuments(layout, context.vocab_size).check_sample()
    except CorruptRecord as error:
        return [Problem(error.place, error.why, error.fix)]
    except UserError as error:
        return list(error.problems)
    except OSError as error:
        return [Problem(context.where, f"cannot be read: {error.strerror or error}", "check its permissions")]
    return []


class MappedFiles:
    """Files as arrays in memory maps. At most :data:`OPEN` are mapped at once, whatever the number of files; arrays that are
    in use keep their map."""

    def __init__(self) -> None:
        self._maps: OrderedDict[tuple[Path, str], NDArray[Any]] = OrderedDict()

    def array(self, file: Path, dtype: str, skip: int = 0) -> NDArray[Any]:
        """Return the contents of ``file`` after ``skip`` bytes, read-only.

        Raises:
            OSError: it cannot be opened.
        """
        key = (file, f"{skip}{dtype}")
        found = self._maps.get(key)
        if found is None:
            found = mapped(file, dtype, skip)
            self._maps[key] = found
            if len(self._maps) > OPEN:
                self._maps.popitem(last=False)
        else:
            self._maps.move_to_end(key)
        return found


def mapped(file: Path, dtype: str, skip: int = 0) -> NDArray[Any]:
    """Return the contents of ``file`` after ``skip`` bytes as an array in a memory map; bytes at the end that are no whole
    item are left out.

    Raises:
        OSError: it cannot be opened.
    """
    with file.open("rb") as stream:
        size = file.stat().st_size
        count = max(size - skip, 0) // numpy.dtype(dtype).itemsize
        if not count:  # an empty file cannot be mapped
            return numpy.empty(0, dtype)
        content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    return numpy.frombuffer(content, dtype, count, skip)


def needed_path(context: DatasetContext[Any], what: str) -> Path:
    """Return the dataset's path.

    Args:
        what: what it names, for the error.

    Raises:
        UserError: there is none.
    """
    if not context.path:
        raise UserError.one(context.where, f"dataset {context.name!r} needs {what}", "set training.dataset_path")
    return Path(context.path).expanduser()


def describe_amount(documents: int, tokens: int | None, dtypes: Iterable[str]) -> str:
    """Return how much there is, in which types."""
    amount = f"{documents:,} documents" + (f", {tokens:,} tokens" if tokens is not None else "")
    kinds = " and ".join(sorted({numpy.dtype(dtype).name for dtype in dtypes}))
    return f"{amount}, as {kinds}" if kinds else amount
