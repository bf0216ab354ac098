"""Datasets whose documents fill extra tensors. The path is the number of documents, and a flaw: ``"64:missing"``.

``tagged`` gives each token two tags, the id after it and the number of its document, and a score; ``kinds`` gives each
document one number, and a sequence of its own."""

from __future__ import annotations

from typing import Any

import numpy

from titan_core.api import DatasetContext, DocumentSource, ExtraField, ShuffledDocuments, WeightedTokens

FIELDS = {
    "tagged": {"tags": ExtraField("int64", (2,)), "score": ExtraField("float32", fill=-1.0)},
    "kinds": {"kind": ExtraField("int32", sequence=False)},
}


def fields(context: DatasetContext[None]) -> dict[str, ExtraField]:
    return FIELDS[context.name]


class Tagged:
    def __init__(self, name: str, count: int, flaw: str = "") -> None:
        self.name, self.count, self.flaw = name, count, flaw

    def __len__(self) -> int:
        return self.count

    def text(self, index: int) -> WeightedTokens:
        ids = numpy.random.default_rng(index).integers(0, 255, 5 + index * 5 % 9)
        if self.name == "kinds":
            return WeightedTokens(ids, numpy.ones(len(ids)), extras={"kind": numpy.int64(index)})
        extras: dict[str, Any] = {"tags": numpy.stack([ids + 1, numpy.full(len(ids), index)], axis=1)}
        if index % 2:  # the others have the fill value
            extras["score"] = ids / 8.0
        flaws: dict[str, dict[str, Any]] = {
            "missing": {"tags": None},
            "unknown": {"colour": ids},
            "shape": {"tags": ids},
            "type": {"tags": extras["tags"] / 2},
            "nan": {"score": numpy.where(ids > 3, numpy.nan, 0.0)},
        }
        changed = {**extras, **flaws.get(self.flaw, {})}
        extras = {name: value for name, value in changed.items() if value is not None}
        return WeightedTokens(ids, numpy.ones(len(ids)), extras=extras)


def open_tagged(context: DatasetContext[None]) -> DocumentSource:
    count, _, flaw = (context.path or "64").partition(":")
    return ShuffledDocuments(Tagged(context.name, int(count), flaw), context.seed)
