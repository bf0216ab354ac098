"""A dataset of prompts with answers. The first third of each document has weight 0; the weights of the rest alternate
between 1 and 0.5. The path is the number of documents."""

from __future__ import annotations

import numpy

from titan_core.api import DatasetContext, DocumentSource, ShuffledDocuments, WeightedTokens


class Prompts:
    def __init__(self, count: int, flaw: str = "") -> None:
        self.count, self.flaw = count, flaw

    def __len__(self) -> int:
        return self.count

    def text(self, index: int) -> WeightedTokens:
        ids = numpy.random.default_rng(index).integers(0, 256, 9 + index * 5 % 17)
        weights = numpy.where(numpy.arange(len(ids)) % 2, 0.5, 1.0)
        weights[: len(ids) // 3] = 0.0
        if self.flaw == "short":
            weights = weights[:-1]
        elif self.flaw:
            weights[-1] = float(self.flaw)
        return WeightedTokens(ids, weights)


def open_prompts(context: DatasetContext[None]) -> DocumentSource:
    count, _, flaw = (context.path or "64").partition(":")
    return ShuffledDocuments(Prompts(int(count), flaw), context.seed)
