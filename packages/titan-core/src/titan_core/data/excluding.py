"""Sources without some of their documents, which are passed over in the order of the epoch. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from titan_core.api import Document, DocumentShard, DocumentSource, Problem
from titan_core.api.data.dataset import DatasetSpec, DocumentPlace
from titan_core.data.tracing import place_of


class ExcludingShard:
    """A :class:`~titan_core.api.DocumentShard` without some documents. Its positions are those of the whole shard."""

    def __init__(self, shard: DocumentShard, excluded: frozenset[int]) -> None:
        self._shard, self._excluded = shard, excluded
        self.state_dict, self.load_state_dict = shard.state_dict, shard.load_state_dict

    def __iter__(self) -> ExcludingShard:
        return self

    def __next__(self) -> Document:
        while True:
            document = next(self._shard)
            place = place_of(self._shard)
            if place is None or place.index not in self._excluded:
                return document

    def place(self) -> DocumentPlace | None:
        """Return the place of the document that was returned last."""
        return place_of(self._shard)


class ExcludingSource:
    """A source without some documents."""

    def __init__(self, source: DocumentSource, excluded: frozenset[int]) -> None:
        self._source, self._excluded = source, excluded

    @property
    def num_documents(self) -> int | None:
        """See :class:`~titan_core.api.DocumentSource`."""
        return self._source.num_documents

    def shard(self, index: int, count: int, epoch: int) -> DocumentShard:
        """See :class:`~titan_core.api.DocumentSource`."""
        return ExcludingShard(self._source.shard(index, count, epoch), self._excluded)


def excluding(source: DocumentSource, name: str, excluded: Mapping[str, frozenset[int]]) -> DocumentSource:
    """Return the dataset ``name`` without its ``excluded`` documents."""
    indices = excluded.get(name)
    return ExcludingSource(source, indices) if indices else source


def excluding_problems(
    datasets: Iterable[tuple[DatasetSpec, DocumentSource]], excluded: Mapping[str, frozenset[int]]
) -> list[Problem]:
    """Return the reasons why documents cannot be passed over."""
    problems = []
    for dataset, source in datasets:
        indices = excluded.get(dataset.name)
        if not indices:
            continue
        where = f"data.exclude: dataset {dataset.name!r}"
        if source.num_documents is None:
            why = "is a stream, whose documents have no index"
            problems.append(Problem(where, why, "use local files, or remove its lines"))
        elif max(indices) >= source.num_documents:
            why = f"has {source.num_documents:,} documents, and none of index {max(indices):,}"
            problems.append(Problem(where, why, "name documents as `titan data step RUN N --json` prints them"))
        elif not hasattr(source.shard(0, 1, 0), "place"):
            why = "its plugin does not say which documents it returns (DocumentShard.place)"
            problems.append(Problem(where, why, "remove its lines"))
    return problems
