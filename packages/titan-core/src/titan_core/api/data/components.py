"""Datasets, record formats, tokenizers and model hubs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from titan_core.api.data.dataset import DatasetContext, DocumentSource, ExtraField
from titan_core.api.data.tokenizer import TextTokenizer, TokenizerContext
from titan_core.api.plugins.component import Component
from titan_core.api.plugins.errors import Problem
from titan_core.api.plugins.ref import Ref


@dataclass(frozen=True, kw_only=True)
class Dataset(Component):
    """A source of documents, selected by ``training.dataset``."""

    kind = "dataset"
    keys = ("training.dataset", "validation.dataset")
    build: Ref[Callable[[DatasetContext[Any]], DocumentSource]]
    """Opens the dataset. Must not import torch."""
    check: Ref[Callable[[DatasetContext[Any]], Iterable[Problem]]] | None = None
    """Returns the reasons why the dataset cannot be opened (missing file or field, empty file). Cheap; free of torch."""
    describe: Ref[Callable[[DatasetContext[Any]], Iterable[str]]] | None = None
    """Returns lines that say how the dataset is read, such as what was detected in its files, for ``titan data inspect``.
    Cheap; free of torch."""
    splits: bool = False
    """Whether the dataset honours the split in its context. A job that sets a split for any other dataset is refused."""
    holds_tokens: bool = False
    """Whether the documents are token ids, which are meaningful with one tokenizer only. If so, the context holds the
    fingerprint and vocabulary size of the job's tokenizer."""
    tokenizes: bool = False
    """Whether the dataset tokenises its documents, which decides the weight of each token. If so, the context holds the
    job's tokenizer and the length of its sequences, and ``data.document_mask`` must be on: several documents share a
    sequence."""
    extras: Ref[Callable[[DatasetContext[Any]], Mapping[str, ExtraField]]] | None = None
    """Returns the extra tensors of a batch that the documents fill (:attr:`titan_core.api.WeightedTokens.extras`), by name.
    Must not import torch."""


@dataclass(frozen=True, kw_only=True)
class RecordFormat(Component):
    """A conversion of records of a dataset, selected by ``data.format``."""

    kind = "format"
    keys = ("data.format", "validation.format")
    convert: Ref[Callable[[Mapping[str, Any]], Any]]
    """Record -> its text; for dataset ``chat``, a record with a chat. An exception makes the record corrupt
    (``data.on_corrupt``). Must not import torch."""


@dataclass(frozen=True, kw_only=True)
class Tokenizer(Component):
    """A conversion of text to token ids, selected by ``model.tokenizer``."""

    kind = "tokenizer"
    keys = ("model.tokenizer",)
    build: Ref[Callable[[TokenizerContext[Any]], TextTokenizer]]
    """Builds the tokenizer. Must not import torch."""


@dataclass(frozen=True, kw_only=True)
class ModelHub(Component):
    """A place where models with trained weights have names, such as ``organisation/model``."""

    kind = "model hub"
    locate: Ref[Callable[[str], str]]
    """Name -> local folder with the model's files. Raises :class:`~titan_core.api.UserError` if this machine does not
    have them. Must not import torch."""
    describe: Ref[Callable[[str, str], str]] | None = None
    """(name, empty folder) -> local folder with the files that describe the model, without its weights: where this machine
    has them, or the empty folder, after fetching them. Raises :class:`~titan_core.api.UserError` if there is no such model,
    or it cannot be reached."""
