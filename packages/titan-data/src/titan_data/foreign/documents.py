"""Token ids in files of other tools: what their formats share, and the checks of their ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
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
from titan_data.mapped_files import MappedFiles as MappedFiles, detached, mapped as mapped
from titan_data.storage import located, reading, unreadable

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
        if isinstance(document, WeightedTokens):
            return replace(document, ids=detached(document.ids))
        return detached(document)

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
    return ShuffledDocuments(CheckedDocuments(layout, context.vocab_size), context.seed, layout.files, context.shuffle)


def check_documents(context: DatasetContext[Any], opened: Opener) -> list[Problem]:
    """Return what is wrong with the files, or with a sample of their ids."""
    try:
        with reading(context.path or ""):
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
        return [unreadable(context, error)]
    return []


def needed_path(context: DatasetContext[Any], what: str) -> Path:
    """Return the dataset's path.

    Args:
        what: what it names, for the error.

    Raises:
        UserError: there is none.
    """
    if not context.path:
        raise UserError.one(context.where, f"dataset {context.name!r} needs {what}", "set training.dataset_path")
    return located(context.path, context.where)


def describe_amount(documents: int, tokens: int | None, dtypes: Iterable[str]) -> str:
    """Return how much there is, in which types."""
    amount = f"{documents:,} documents" + (f", {tokens:,} tokens" if tokens is not None else "")
    kinds = " and ".join(sorted({numpy.dtype(dtype).name for dtype in dtypes}))
    return f"{amount}, as {kinds}" if kinds else amount
