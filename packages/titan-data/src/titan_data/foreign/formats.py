"""The formats of token ids that other tools write, and what opens, checks and describes a dataset of any of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from titan_core.api import DatasetContext, DocumentSource, Problem, ShuffledDocuments, UserError
from titan_data.compressed import decompressed
from titan_data.foreign import datatrove, flat_tokens, mds, megatron
from titan_data.foreign.documents import UNRECORDED, Format, TokenDocuments
from titan_data.storage import located, problems

FORMATS: Final[dict[str, Format]] = {
    "megatron": megatron.FORMAT,
    "mds": mds.FORMAT,
    "datatrove": datatrove.FORMAT,
    "flat_tokens": flat_tokens.FORMAT,
}
"""By name of the dataset."""


def open_tokens(context: DatasetContext[Any]) -> DocumentSource:
    """Open the files at ``training.dataset_path``.

    Raises:
        UserError: they are missing, damaged or empty, or are not understood.
    """
    documents = _documents(context)
    decompressed(_packed(documents), context.max_record_bytes)
    shuffled = ShuffledDocuments(documents, context.seed, documents.files, context.shuffle)
    divide = FORMATS[context.name].divide
    return shuffled if divide is None else divide(context, shuffled)


def check_tokens(context: DatasetContext[Any]) -> list[Problem]:
    """Return what is wrong with the files, or with a sample of their ids."""

    def check() -> list[Problem]:
        documents = _documents(context)
        if _packed(documents):  # decompress one file, not all
            documents = TokenDocuments(documents.token_files[:1], context.vocab_size, context.max_record_bytes)
            decompressed(_packed(documents), context.max_record_bytes)
        if not context.skip_corrupt:
            documents.check_sample()
        return []

    return problems(context, check)


def describe_tokens(context: DatasetContext[Any]) -> list[str]:
    """Return how much there is, and how it is read."""
    amount, *more = FORMATS[context.name].describe(_documents(context).token_files)
    return [amount, UNRECORDED, *more]


def _packed(documents: TokenDocuments) -> list[Path]:
    return [file.packed for file in documents.token_files if file.packed is not None]


def _documents(context: DatasetContext[Any]) -> TokenDocuments:
    """
    Raises:
        UserError: the files are missing, damaged or empty, or are not understood.
    """
    form = FORMATS[context.name]
    if not context.path:
        why = f"dataset {context.name!r} needs {form.needs}"
        raise UserError.one(context.where, why, "set training.dataset_path")
    found = form.find(context, located(context.path, context.where))
    documents = TokenDocuments(found, context.vocab_size, context.max_record_bytes)
    if not len(documents):
        raise UserError.one(context.where, "the dataset contains no documents", "check the path")
    return documents
