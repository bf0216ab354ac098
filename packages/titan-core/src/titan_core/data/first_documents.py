"""Checks before the first step that all ranks read the same documents, and that each source resumes where it stopped.

Each rank reads two records of its first logical shard, and one of that of the next data rank, from shards of its own that it
then drops. So each shard that is read has two readers, however many ranks there are, and those of one data rank (the stages
of a pipeline, for example) read the same one. Later records, and later epochs, are not compared.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from titan_core.api import CorruptRecord, DocumentShard, DocumentSource, ExcludedRecord, Problem, UserError, World
from titan_core.api.data.dataset import DatasetSpec, StreamSpec
from titan_core.toolkit.reading import is_transient
from titan_core.toolkit.stream_check import digest_of, position_of, require_document
from titan_core.toolkit.text import ranks

log = logging.getLogger(__name__)
T = TypeVar("T")

_NO_DOCUMENT = -1
_Read = dict[tuple[str, int], tuple[int | None, int]]
"""(dataset, logical shard) -> the source's number of documents, and a checksum of the shard's first record."""


def check_first_documents(spec: StreamSpec, sources: Sequence[DocumentSource], world: World) -> None:
    """Check the sources of ``spec``. All ranks must call it.

    Raises:
        UserError: ranks read different documents, or a source continues elsewhere after a restore; on every rank.
    """
    owned = spec.plan.logical_shards // spec.plan.ranks
    own, next_ = (data_rank % spec.plan.ranks * owned for data_rank in (world.data_rank, world.data_rank + 1))
    read: _Read = {}
    mistake: UserError | None = None
    try:
        for dataset, source in zip(spec.datasets, sources, strict=True):
            first = _Shards(dataset, source, spec.plan.logical_shards)
            for index in dict.fromkeys((own, next_)):
                try:
                    read[dataset.name, index] = source.num_documents, first.record(index, resumes=index == own)
                except Exception as error:
                    cause = error.__cause__ or error  # what the plugin raised
                    if not (isinstance(cause, Exception) and is_transient(cause)):
                        raise
                    why = f"{type(cause).__name__}: {cause}"
                    log.warning("dataset %r: its first documents are not compared between ranks: %s", dataset.name, why)
    except UserError as error:
        mistake = error
    world.raise_together(mistake)
    if problems := list(_differences(spec, world.gather(read))):
        raise UserError(*problems)


def _differences(spec: StreamSpec, read: list[_Read]) -> Iterator[Problem]:
    """Yield the first difference of each dataset."""
    for dataset in spec.datasets:
        for key in sorted({key for of_rank in read for key in of_rank if key[0] == dataset.name}):
            found: dict[tuple[int | None, int], list[int]] = {}
            for rank, of_rank in enumerate(read):
                if key in of_rank:
                    found.setdefault(of_rank[key], []).append(rank)
            if len(found) > 1:
                (one, some), (other, others), *_ = found.items()
                what = f"another first document of logical shard {key[1]} of {spec.plan.logical_shards} than"
                if one[0] != other[0]:
                    what = f"{other[0]} documents, and not {one[0]} as"
                yield Problem(
                    _name(dataset),
                    f"{ranks(others)} read{'s' * (len(others) == 1)} {what} {ranks(some)}",
                    "give all ranks the same files; the plugin must derive documents from its settings, the seed and the "
                    "logical shard alone (not from RANK, a process id, the time or random numbers of its own)",
                )
                break


def _name(dataset: DatasetSpec) -> str:
    return f"dataset {dataset.name!r}" if dataset.build.origin is None else str(dataset.build.origin)


class _Shards:
    """New shards of a source, whose errors name its plugin."""

    def __init__(self, dataset: DatasetSpec, source: DocumentSource, count: int) -> None:
        self._dataset, self._source, self._count = dataset, source, count

    def record(self, index: int, resumes: bool) -> int:
        """Return a checksum of the first record of logical shard ``index``.

        Args:
            resumes: whether to check that the shard continues with its second record after a restore.

        Raises:
            UserError: it does not.
        """
        shard = self._new(index)
        first = self._next(shard)
        if not resumes or first == _NO_DOCUMENT:
            return first
        position = self._call("state_dict", position_of, shard)
        try:
            saved = json.loads(json.dumps(position))
        except (TypeError, ValueError) as error:
            raise self._wrong(f"state_dict returned {position!r}, which JSON cannot hold: {error}") from None
        second, other = self._next(shard), self._new(index)
        if other is shard:
            raise self._wrong("shard returned the same object twice; it must return a new one")
        self._call("load_state_dict", other.load_state_dict, saved)
        if self._next(other) != second:
            again = self._new(index)
            if (self._next(again), self._next(again)) != (first, second):
                raise self._wrong(
                    f"logical shard {index} of {self._count}, read twice by one process, has other documents then "
                    "(random numbers of its own, the time, or state that its shards share)"
                )
            raise self._wrong(
                f"logical shard {index} of {self._count} continues elsewhere if the position after its first document, "
                f"{saved}, is loaded into a new shard: a resumed run would skip documents, or read some twice"
            )
        return first

    def _new(self, index: int) -> DocumentShard:
        return self._call("shard", self._source.shard, index, self._count, 0)

    def _next(self, shard: DocumentShard) -> int:
        return self._call("__next__", _checksum, shard)

    def _call(self, what: str, function: Callable[..., T], *arguments: Any) -> T:
        origin = self._dataset.build.origin
        return function(*arguments) if origin is None else origin.call(what, function, *arguments)

    def _wrong(self, why: str) -> UserError:
        origin = self._dataset.build.origin
        if origin is None:
            return UserError.one(_name(self._dataset), why, "fix the plugin of the dataset")
        return origin.failure(why)


def _checksum(shard: DocumentShard) -> int:
    """Return a checksum of the next record; of none, at the shard's end, :data:`_NO_DOCUMENT`."""
    try:
        return digest_of(require_document(next(shard)))
    except StopIteration:
        return _NO_DOCUMENT
    except (CorruptRecord, ExcludedRecord):  # reported when the data is read to train on it
        return 0
