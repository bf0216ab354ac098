"""Checks of the documents that a stream passes over (:mod:`titan_core.data.tokens`). Free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from titan_core.api import DocumentSource, Problem
from titan_core.api.data.dataset import DatasetSpec


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
