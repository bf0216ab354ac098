"""Batches of the rows that logical shards contribute to a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from titan_core.api import Batch, Extra
from titan_core.api.data.dataset import StreamSpec
from titan_core.api.data.replay import StepRows
from titan_core.api.training.batch import IGNORE


def batch_of(
    spec: StreamSpec, parts: Sequence[StepRows], document_mask: bool, first_row: int = 0, ends: bool = False
) -> Batch:
    """Return the rows of successive logical shards as one batch.

    Args:
        document_mask: whether positions and attention restart with each document.
        ends: whether to give the documents' ends too, for variable-length attention.
        first_row: number of the first row in the global batch. A logical shard fills the same rows of each batch.
    """
    rows = numpy.concatenate([part.tokens for part in parts]) if len(parts) > 1 else parts[0].tokens
    whole = _batch(rows, _weights(parts), [lengths for part in parts for lengths in part.lengths], document_mask)
    whole = replace(whole, rows=torch.arange(first_row, first_row + len(rows)), extras=_extras(spec, parts))
    return with_document_ends(whole) if ends else whole


def with_document_ends(batch: Batch) -> Batch:
    """Return the batch, whose documents follow each other, with their ends and length. Of both, few values occur: powers of
    two, because kernels and compiled code are made for one; and no length below 256, for which cuDNN has no kernel before
    9.24."""
    assert batch.documents is not None
    documents = batch.documents.numpy()
    rows, length = documents.shape
    last = numpy.ones(documents.shape, bool)
    last[:, :-1] = documents[:, 1:] != documents[:, :-1]
    ends = [row.nonzero()[0] + 1 for row in last]
    longest = max(int(numpy.diff(row, prepend=0).max()) for row in ends)
    filled = numpy.full((rows, _power_of_two(max(map(len, ends)), 8)), length, numpy.int32)
    for row, own in zip(filled, ends, strict=True):
        row[: len(own)] = own
    return replace(batch, document_ends=torch.from_numpy(filled), longest_document=min(length, _power_of_two(longest, 256)))


def _power_of_two(number: int, least: int) -> int:
    """Return the power of two that is at least ``number`` and ``least``, which is one."""
    return max(least, 1 << (number - 1).bit_length())


def _extras(spec: StreamSpec, parts: Sequence[StepRows]) -> dict[str, Extra]:
    """Return the extra tensors of the rows of ``parts``."""
    found = {}
    for name, extra in spec.extras.items():
        values = numpy.concatenate([part.extras[name] for part in parts])
        if extra.sequence:  # each row is one token longer than a sequence
            values = numpy.ascontiguousarray(values[:, :-1])
        found[name] = Extra(torch.from_numpy(values), extra.sequence)
    return found


def _weights(parts: Sequence[StepRows]) -> NDArray[Any] | None:
    if all(part.weights is None for part in parts):
        return None
    ones = numpy.float32(1)
    return numpy.concatenate(
        [numpy.full(part.tokens.shape, ones) if part.weights is None else part.weights for part in parts]
    )


def _batch(rows: NDArray[Any], weights: NDArray[Any] | None, lengths: list[list[int]], document_mask: bool) -> Batch:
    """Return the batch of ``rows``, each one token longer than a sequence: the target of a position is the next token."""
    width = rows.shape[1]
    tokens, targets = torch.from_numpy(rows[:, :-1].astype(numpy.int64)), rows[:, 1:].astype(numpy.int64)
    for row, pieces in zip(targets, lengths, strict=True):
        if sum(pieces) < width:
            row[max(sum(pieces) - 1, 0) :] = IGNORE
    of_targets: torch.Tensor | None = None
    if weights is not None:
        targets[weights[:, 1:] == 0] = IGNORE
        of_targets = torch.from_numpy(weights[:, 1:].copy())
    if not document_mask:
        return Batch(tokens, torch.from_numpy(targets), weights=of_targets)
    documents, starts = numpy.empty(rows.shape, numpy.int64), numpy.empty(rows.shape, numpy.int64)
    for number, pieces in enumerate(lengths):
        sizes = numpy.array([*pieces, width - sum(pieces)])  # padding of a short row counts as a document
        documents[number] = numpy.arange(len(sizes)).repeat(sizes)
        starts[number] = (sizes.cumsum() - sizes).repeat(sizes)
    positions = numpy.arange(width) - starts
    targets[documents[:, 1:] != documents[:, :-1]] = IGNORE  # the first token of the next document
    return Batch(
        tokens,
        torch.from_numpy(targets),
        weights=of_targets,
        positions=torch.from_numpy(positions[:, :-1].copy()),
        documents=torch.from_numpy(documents[:, :-1].copy()),
    )
