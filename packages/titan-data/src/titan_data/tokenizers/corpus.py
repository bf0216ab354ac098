"""The text that a tokenizer is trained on: the documents of one or several datasets, read one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from titan_core.api import UserError
from titan_core.api.data.tokenizer import without_surrogates
from titan_core.toolkit.reading import DatasetSpec, DocumentReader, ReadPolicy

_SAMPLE = 1 << 20


class Corpus:
    """Iterates once over the texts of ``datasets``. If ``limit`` bytes do not suffice for all of them, each dataset gets a
    share by its weight."""

    def __init__(self, datasets: Sequence[DatasetSpec], policy: ReadPolicy, limit: int) -> None:
        self._datasets = [dataset for dataset in datasets if dataset.weight]
        self._policy, self._limit = policy, limit
        self.documents = self.bytes = self.corrupt = 0
        """Documents and bytes of UTF-8 read so far, and corrupt records skipped."""
        self.cut: list[str] = []
        """Names of the datasets that were not read to their end."""
        self.ended = False
        """Whether all texts have been read."""
        self.sample: list[str] = []
        """The first texts, about 1 MB."""

    def __iter__(self) -> Iterator[str]:
        weight = sum(dataset.weight for dataset in self._datasets)
        for dataset in self._datasets:
            size = 0
            for text in self._texts(dataset):
                if size >= self._limit * dataset.weight / weight:
                    self.cut.append(dataset.name)
                    break
                length = len(text.encode())
                size += length
                self.bytes += length
                self.documents += 1
                if self.bytes <= _SAMPLE or not self.sample:
                    self.sample.append(text)
                yield text
        self.ended = True

    def _texts(self, dataset: DatasetSpec) -> Iterator[str]:
        source = dataset.build.load()(dataset.context)
        shard = source.shard(0, 1, 0)
        reader = DocumentReader(self._policy, dataset.name)
        while (document := reader.next(shard)) is not None:
            if not isinstance(document, str):
                why = "contains token ids; a tokenizer is trained on text"
                raise UserError.one(f"dataset {dataset.name!r}", why, "train on the dataset that it was tokenised from")
            yield without_surrogates(document)
        self.corrupt += reader.corrupt
