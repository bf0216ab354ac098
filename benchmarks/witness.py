"""Measures what the witnesses of a position cost a reader: CPU time per document, with them and without.

OMP_NUM_THREADS=1 uv run python -m benchmarks.witness
"""

from __future__ import annotations

import time
from typing import Any

import numpy

from titan_core.api import BatchPlan, DatasetContext, Document, Ref, ShuffledDocuments, TokenizerContext
from titan_core.data import shards, tokens
from titan_core.data.byte_tokenizer import ByteTokenizer
from titan_core.toolkit.reading import DatasetSpec, StreamSpec

REPEATS = 3


class Made:
    """Documents in memory."""

    def __init__(self, ids: bool, size: int) -> None:
        self._ids = numpy.arange(size + len(self), dtype=numpy.uint16) % 256 if ids else None
        self._text, self._size = "word " * (size // 5), size

    def __len__(self) -> int:
        return 4000

    def text(self, index: int) -> Document:
        """Return a document; neighbours differ."""
        return f"{self._text}{index}" if self._ids is None else self._ids[index : index + self._size]


def tokens_per_second(documents: Made) -> float:
    """Return the number of tokens that are read in a second of CPU time."""
    context: DatasetContext[Any] = DatasetContext("made", None, "text", 0, "here", section=None)
    dataset = DatasetSpec("made", 1.0, Ref("nowhere:open"), context)
    plan = BatchPlan(8, 8, 1, 1, 8, 2048)
    build: Ref[Any] = Ref("titan_core.data.byte_tokenizer:build")
    spec = StreamSpec((dataset,), build, TokenizerContext(None, section=None), plan, 0, "repeat")
    group = shards.ShardGroup(spec, [ShuffledDocuments(documents, 0)], ByteTokenizer(), range(8))
    started, read = time.process_time(), 0
    while time.process_time() - started < 1.0:
        rows = group.read()
        assert rows is not None
        read += rows.tokens.size
    return read / (time.process_time() - started)


def main() -> None:
    """Print a row for each kind and size of documents."""
    witnessed, digest = shards.WitnessedSource, tokens.TokenStream._digest
    print("| documents | without | with | more a document |\n| --- | --- | --- | --- |")
    for ids in (True, False):
        for size in (300, 1000, 10_000):
            best = {False: 0.0, True: 0.0}
            for on in [False, True] * REPEATS:
                shards.WitnessedSource = witnessed if on else lambda source, name: source  # type: ignore[misc, assignment]
                tokens.TokenStream._digest = digest if on else lambda stream: None  # type: ignore[method-assign]
                best[on] = max(best[on], tokens_per_second(Made(ids, size)))
            more = (size / best[True] - size / best[False]) * 1e6
            kind = "ids" if ids else "characters"
            print(f"| {size:,} {kind} | {best[False] / 1e6:.0f}M tokens/s | {best[True] / 1e6:.0f}M | {more:.0f} us |")


if __name__ == "__main__":
    main()
