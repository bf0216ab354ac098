"""Check that a restored stream is where it was: its last records are read again. Free of torch.

A source may restore a position wrongly, or its data may have changed: nothing fails, and the run trains on other documents.
A position therefore begins before the last records, and contains their number and a digest. This needs nothing of a source,
so it covers every library and plugin.

Records with :data:`DIFFERENT` different documents show each shift by fewer records than that, however many of them are
copies: if a shift by ``n`` changed none of them, they would repeat every ``n`` records.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, cast
from zlib import crc32

from titan_core.api import CorruptRecord, Document, DocumentShard, ExcludedRecord, UserError, WeightedTokens
from titan_core.api.data.dataset import State
from titan_core.api.plugins.errors import shown

DIFFERENT: Final = 3
"""Number of different documents that are read again."""
LONGEST: Final = 64
"""Number of records that suffice, reached among copies of the same two documents."""


def require_document(document: Any) -> Document:
    """Return ``document``.

    Raises:
        TypeError: it is none. ``None`` would pass for the end of the data.
    """
    # Sequences of ids are checked where they become tokens.
    if isinstance(document, str | WeightedTokens | list | tuple) or hasattr(document, "dtype"):
        return cast("Document", document)
    raise TypeError(f"{shown(document)} is no document: a str, an array of token ids or WeightedTokens")


def position_of(shard: DocumentShard) -> State:
    """Return the position of ``shard``."""
    try:
        return shard.state_dict()
    except StopIteration as error:  # would pass for the end of the data
        raise RuntimeError("state_dict raised StopIteration") from error


def digest_of(document: Document) -> int:
    """Return a checksum of all that a step uses of ``document``."""
    if isinstance(document, str):
        return crc32(document.encode("utf-8", "surrogatepass"))
    import numpy  # not above: the help of commands imports this file

    digest, arrays = 0, {"": document}
    if isinstance(document, WeightedTokens):
        digest = crc32(f"{document.whole}{document.parts}".encode())
        arrays = {"": document.ids, " weights": numpy.asarray(document.weights, "<f4"), **document.extras}
    for name in sorted(arrays):
        array = numpy.ascontiguousarray(arrays[name])
        digest = crc32(array.data, crc32(f"{name} {array.dtype.str} {array.shape}".encode(), digest))
    return digest


@dataclass(frozen=True)
class ShardName:
    """A logical shard of a dataset, for error messages."""

    dataset: str
    index: int
    count: int

    def __str__(self) -> str:
        return f"dataset {self.dataset!r}, logical shard {self.index} of {self.count}"

    def mismatch(self, position: State) -> UserError:
        """Return the error for a shard whose last records before ``position`` are not those that were read."""
        return UserError.one(
            f"{self}, position {position}",
            "data position mismatch: the last records before this position are not those that were read. The data has "
            "changed, or the library or plugin that reads it restores positions wrongly",
            "restore the data and the library's version, or start a new run; to continue from this position anyway, add "
            f'"dataset.{self.dataset}.content" to checkpoint.allow_changed',
        )


@dataclass
class _Records:
    """Successive records of a shard, from ``begin``."""

    begin: State
    count: int = 0
    digest: int = 0
    different: set[int] = field(default_factory=set)

    def is_enough(self) -> bool:
        return len(self.different) >= DIFFERENT or self.count >= LONGEST


class StreamCheck:
    """The last records that were read from a shard, which are read again after it was restored, or after an error."""

    def __init__(self, name: ShardName, begin: State, records: int | None = None) -> None:
        """
        Args:
            begin: a position of the shard.
            records: number of records behind it that must be read again first; ``None``: the shard is at ``begin``.
        """
        self._name = name
        self._again: tuple[State, int, int | None] | None = None if records is None else (begin, records, None)
        self._reads = [_Records(begin)]  # enough of them, then those since: they will be enough some time
        self.before = begin
        """Position of the shard before the record that was read last."""

    @property
    def position(self) -> State:
        """Where the last records begin, and their number."""
        return {"document": self._reads[0].begin, "records": self._reads[0].count}

    @property
    def digest(self) -> int:
        """Digest of the last records."""
        return self._reads[0].digest

    def read(self, shard: DocumentShard) -> Document | None:
        """Return the next document of ``shard``, or ``None`` at its end.

        Raises:
            UserError: the last records, if they must be read again, are not those that were read.
        """
        if self._again is not None:
            self._read_again(shard, *self._again)
        return self._read(shard)

    def lose(self) -> None:
        """Note that reading has failed, so that the last records must be read again."""
        if self._again is None:
            self._again = self._reads[0].begin, self._reads[0].count, self.digest

    def _read_again(self, shard: DocumentShard, begin: State, records: int, digest: int | None) -> None:
        shard.load_state_dict(begin)
        self._reads = [_Records(begin)]
        for _ in range(records):
            try:
                self._read(shard)
            except (CorruptRecord, ExcludedRecord):
                continue  # reported when it was first read
        if digest not in (None, self.digest):
            raise self._name.mismatch(begin)
        self._again = None

    def _read(self, shard: DocumentShard) -> Document | None:
        self.before = position_of(shard)
        try:
            document = require_document(next(shard))
        except StopIteration:
            return None
        except (CorruptRecord, ExcludedRecord):
            self._add(0, shard)
            raise
        self._add(digest_of(document), shard)
        return document

    def _add(self, digest: int, shard: DocumentShard) -> None:
        if self._reads[-1].is_enough():
            self._reads = [self._reads[-1], _Records(self.before)]
        for records in self._reads:
            records.count += 1
            records.different.add(digest)
            # A shuffled block also has documents that were not returned yet.
            records.digest = crc32(f"{digest} {getattr(shard, 'block_digest', 0)}".encode(), records.digest)
