"""Dataset ``input_ids``: records that have been tokenised, as ``datasets`` and trainers of ``transformers`` keep them.

A column ``labels`` says which tokens are trained on (-100: not), and a column ``attention_mask`` which of them are padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy
from numpy.typing import NDArray

from titan_core.api import (
    CorruptRecord,
    DatasetContext,
    Document,
    DocumentSource,
    ExcludedRecord,
    Problem,
    WeightedTokens,
)
from titan_core.api.data.tokenizer import token_ids
from titan_core.toolkit.plain_json import json_kind
from titan_data.foreign.config import InputIdsSection
from titan_data.foreign.documents import TOKENIZER_FIX, UNRECORDED
from titan_data.local_files import check_first, form_of
from titan_data.records import missing_field
from titan_data.storage import problems

FORMS: Final = ("parquet", "arrow", "json")
CONTENTS: Final = "with a column of token ids"
IGNORED: Final = -100
"""The label of a token without a loss, as in ``torch.nn.CrossEntropyLoss``."""


class InputIdsReader:
    """Converts records to documents."""

    def __init__(self, context: DatasetContext[InputIdsSection]) -> None:
        self._column, self._vocab_size = context.section.column, context.vocab_size

    def __call__(self, record: Any, place: str) -> Document:
        """Return the tokens of ``record``.

        Raises:
            CorruptRecord: it has no token ids, or they are outside the vocabulary.
            ExcludedRecord: none of its tokens is trained on.
        """
        if not isinstance(record, Mapping):
            raise CorruptRecord(place, f"a record must be a JSON object, not {json_kind(record)}")
        if self._column not in record:
            raise CorruptRecord(place, missing_field(self._column, record), "set input_ids.column")
        ids = _integers(record[self._column], self._column, place)
        if self._vocab_size is not None:
            try:
                ids = token_ids(ids, self._vocab_size)
            except ValueError as error:
                raise CorruptRecord(place, str(error), TOKENIZER_FIX) from None
        labels = _beside(record, "labels", ids, place)
        mask = _beside(record, "attention_mask", ids, place)
        kept = slice(None) if mask is None else _kept(mask, place)
        if labels is None:
            return ids[kept]
        if (wrong := numpy.flatnonzero((labels != IGNORED) & (labels != ids))).size:
            at = int(wrong[0])
            why = f"label {at} is {labels[at]}, but token {at} is {ids[at]}: labels other than the tokens are not supported"
            raise CorruptRecord(place, why, f"make each label its own token or {IGNORED}, or remove the column")
        weights = (labels != IGNORED).astype(numpy.float32)[kept]
        if not weights[1:].any():
            raise ExcludedRecord(place, f"all of its labels are {IGNORED}")
        return WeightedTokens(ids[kept], weights)


def _integers(value: Any, name: str, place: str) -> NDArray[Any]:
    ids = None
    if isinstance(value, list | tuple | numpy.ndarray):
        try:
            ids = numpy.asarray(value if len(value) else numpy.empty(0, numpy.int64))
        except (ValueError, OverflowError):  # lists of other lists; numbers beyond 64 bits
            ids = None
    if ids is None or ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise CorruptRecord(place, f"column {name!r} contains {json_kind(value)} that is not a list of token ids")
    return ids


def _beside(record: Mapping[str, Any], name: str, ids: NDArray[Any], place: str) -> NDArray[Any] | None:
    if record.get(name) is None:
        return None
    values = _integers(record[name], name, place)
    if len(values) != len(ids):
        raise CorruptRecord(place, f"column {name!r} has {len(values)} values, but there are {len(ids)} token ids")
    return values


def _kept(mask: NDArray[Any], place: str) -> slice:
    """Return the tokens between the padding at both ends."""
    kept = numpy.flatnonzero(mask)
    if not len(kept):
        return slice(0, 0)
    first, last = int(kept[0]), int(kept[-1]) + 1
    if last - first != len(kept):
        why = "its attention_mask is 0 between other tokens, which cannot be represented"
        raise CorruptRecord(place, why, "remove these tokens, or the column")
    return slice(first, last)


def open_input_ids(context: DatasetContext[InputIdsSection]) -> DocumentSource:
    """Open local files, or a dataset on the hub if no such file exists.

    Raises:
        UserError: it cannot be opened.
    """
    from titan_data.huggingface import stream_hub

    read, form = InputIdsReader(context), form_of(context, FORMS, CONTENTS)
    return stream_hub(context, read) if form is None else _open_files(context, form, read)


def _open_files(context: DatasetContext[InputIdsSection], form: str, read: InputIdsReader) -> DocumentSource:
    from titan_data.record_files import open_files
    from titan_data.table_columns import Columns, is_integers

    column = context.section.column
    fix = "set input_ids.column"
    columns = Columns(
        column, is_integers, "lists of token ids", fix, ("labels", "attention_mask"), may_be_null=context.skip_corrupt
    )
    return open_files(context, form, read, columns)


def check_input_ids(context: DatasetContext[InputIdsSection]) -> list[Problem]:
    """Check the first record of JSON lines, or the columns of Parquet and Arrow files."""

    def check() -> list[Problem]:
        form = form_of(context, FORMS, CONTENTS)
        check_first(context, form, InputIdsReader(context))
        if form in ("parquet", "arrow"):
            _open_files(context, form, InputIdsReader(context))
        return []

    return problems(context, check)


def describe_input_ids(context: DatasetContext[InputIdsSection]) -> list[str]:
    """Return the form of the files."""
    form = form_of(context, FORMS, CONTENTS)
    return [f"column {context.section.column!r} of {form or 'a dataset on the hub'}", UNRECORDED]
