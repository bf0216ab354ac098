"""A dataset for tests of the data stream. Each document repeats one character. The path lists the lengths, as in
``"3,0,12"`` (or ``"3/0/12"`` for a long list, because a config limits the length of names in a path). ``!`` is a corrupt
record, and the prefix ``stream:`` makes the dataset a stream."""

from __future__ import annotations

import re
from typing import Any

from titan_core.api import BatchPlan, CorruptRecord, DatasetContext, DocumentSource, Ref, ShuffledDocuments, TokenizerContext
from titan_core.api.data.dataset import DatasetSpec, ReadPolicy, StreamSpec
from titan_core.data.byte_tokenizer import ByteTokenizer

BYTE = ByteTokenizer()
BYTE_REF: Ref[Any] = Ref("titan_core.data.byte_tokenizer:build")


class Letters:
    def __init__(self, lengths: list[str], first: int) -> None:
        self.lengths, self.first = lengths, first

    def __len__(self) -> int:
        return len(self.lengths)

    def text(self, index: int) -> str:
        if self.lengths[index] == "!":
            raise CorruptRecord(f"letters:{index}", "no letters")
        return chr(self.first + index % 90) * int(self.lengths[index])


class Stream:
    """The same documents in their own order, from a source of unknown length."""

    num_documents = None

    def __init__(self, letters: Letters) -> None:
        self.letters = letters

    def shard(self, index: int, count: int, epoch: int) -> Any:
        return ShuffledDocuments(self.letters, 0, shuffle="none").shard(index, count, epoch)


def open_letters(context: DatasetContext[None]) -> DocumentSource:
    kind, _, lengths = (context.path or "").rpartition(":")
    # Each dataset of a mixture has its own alphabet.
    first = 33 if context.name == "letters" else 33 + 90
    letters = Letters([length for length in re.split("[,/]", lengths) if length], first)
    return Stream(letters) if kind == "stream" else ShuffledDocuments(letters, context.seed, shuffle=context.shuffle)


def letters(lengths: str, name: str = "letters", weight: float = 1.0, seed: int = 0) -> DatasetSpec:
    context = DatasetContext(name, lengths, "text", seed, "test", section=None)
    return DatasetSpec(name, weight, Ref("harness.letters:open_letters"), context)


def stream(
    *datasets: DatasetSpec, plan: BatchPlan, on_end: Any = "repeat", on_corrupt: Any = "stop", **more: Any
) -> StreamSpec:
    return StreamSpec(
        datasets, BYTE_REF, TokenizerContext(None, section=None), plan, 0, on_end, ReadPolicy(on_corrupt, 2, 0.0), **more
    )
