"""Pairs of answers to a prompt: both in one sequence, each with the prompt before it."""

import json
from pathlib import Path

import numpy

from titan_core.api import CorruptRecord, DatasetContext, DocumentSource, ExcludedRecord, ShuffledDocuments, WeightedTokens


class Preferences:
    def __init__(self, context: DatasetContext[None]) -> None:
        assert context.path and context.tokenizer_spec and context.seq_len  # required by `check`, granted to `tokenizes`
        self.path, self.longest = Path(context.path), context.seq_len + 1
        self.tokenizer = context.tokenizer_spec.open()
        self.lines = self.path.read_text(encoding="utf-8").splitlines()

    def __len__(self) -> int:
        return len(self.lines)

    def text(self, index: int) -> WeightedTokens:
        """Return a pair, whose targets weigh 1 together, so that the loss is a mean over pairs."""
        place = f"{self.path}:{index + 1}"
        try:
            record = json.loads(self.lines[index])
            prompt, answers = self.ids(record["prompt"]), [self.ids(record[name]) for name in ("chosen", "rejected")]
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptRecord(place, f"is not an object with prompt, chosen and rejected ({error!r})") from None
        begin, end = self.tokenizer.begin_ids, self.tokenizer.end_ids
        answers = [[*answer, *end] for answer in answers]
        first = len(begin) + len(prompt)
        parts = tuple(first + len(answer) for answer in answers)
        if sum(parts) > self.longest or not (first and all(answers)):
            raise ExcludedRecord(place, f"has {sum(parts)} tokens, and a sequence {self.longest}, or an empty answer")
        ids = numpy.array([token for answer in answers for token in (*begin, *prompt, *answer)])
        answered = numpy.concatenate([numpy.arange(length) >= first for length in parts])
        sides = numpy.repeat([1, -1], parts).astype(numpy.int8)
        return WeightedTokens(ids, answered / answered.sum(), whole=True, parts=parts, extras={"preference": sides})

    def ids(self, text: str) -> list[int]:
        """Return the ids of ``text`` without those that mark a document."""
        begin, end = len(self.tokenizer.begin_ids), len(self.tokenizer.end_ids)
        ids = [int(token) for token in self.tokenizer.encode_document(text)]
        return ids[begin : len(ids) - end]


def build(context: DatasetContext[None]) -> DocumentSource:
    documents = Preferences(context)
    return ShuffledDocuments(documents, context.seed, files=[documents.path], shuffle=context.shuffle)
