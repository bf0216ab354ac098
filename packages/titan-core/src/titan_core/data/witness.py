"""Proof that a restored stream stands where its state says. Free of torch.

A source may restore a position wrongly, or its data may have changed: nothing fails, and the run trains on other documents.
A position therefore contains a digest of the last documents before it and begins before the first of them, so that restoring
it reads them again. This needs nothing of a source, so it covers every library and plugin.

A shift of the stream is visible only where neighbours differ. The *witnessed* documents are the shortest run of the last
documents that has :data:`DISTINCT` different ones, and so begins with one that does not occur in it again: a shift by fewer
documents than it has is seen, however many of them are equal.

Few positions are saved, so digests are computed when one is: until then, a position refers to the documents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar, cast

import numpy

from titan_core.api import CorruptRecord, Document, DocumentShard, DocumentSource, ExcludedRecord, UserError, WeightedTokens
from titan_core.api.data.dataset import DocumentPlace, State
from titan_core.data.tracing import place_of
from titan_core.toolkit.reading import require_document

ACCEPTED: Final = ""
"""Instead of a digest: the user accepts whatever is at the position."""
DISTINCT: Final = 3
"""Number of different documents that are witnessed."""
LONGEST: Final = 64
"""Maximum number of documents that are witnessed, reached among copies of the same two documents."""
KEPT: Final = 2**16
"""Maximum length of a document that is kept until its digest is needed."""
_CHARACTERS = 16
_SAMPLE = 8
_SPARE = 8
"""Number of documents that may be read before those that are no longer witnessed are removed."""
T = TypeVar("T")


class Late(Generic[T]):
    """A value that is computed when it is first needed, from arguments that must not change until then."""

    def __init__(self, make: Callable[..., T], *arguments: Any) -> None:
        self._make, self._arguments = make, arguments
        self._made: list[T] = []

    def get(self) -> T:
        """Return the value. Threads may call this at the same time."""
        arguments = self._arguments  # before the look at the value: they are dropped once it is there
        if not self._made:
            self._made.append(self._make(*arguments))
            self._arguments = ()
        return self._made[0]

    def __repr__(self) -> str:
        return repr(self.get())


def computed(position: Any) -> Any:
    """Return ``position`` as plain values: with all of its digests."""
    if isinstance(position, dict):
        return {key: computed(value) for key, value in position.items()}
    if isinstance(position, list):
        return list(map(computed, position))
    return position.get() if isinstance(position, Late) else position


@dataclass(frozen=True)
class ShardName:
    """A logical shard of a dataset, for error messages."""

    dataset: str
    index: int
    count: int

    def __str__(self) -> str:
        return f"dataset {self.dataset!r}, logical shard {self.index} of {self.count}"

    def displaced(self, state: State, why: str) -> UserError:
        """Return the error for a source that does not stand at ``state``.

        Args:
            state: as the source itself saved it.
        """
        return UserError.one(
            f"{self}, position {state}",
            f"the stream stands elsewhere than when this position was saved: {why}. The data has changed, or the library or "
            "plugin that reads it restores positions wrongly",
            "restore the data and the library's version, or start a new run; to continue from wherever it stands, add "
            f'"dataset.{self.dataset}.content" to checkpoint.allow_changed',
        )


def digest_of(document: Document | CorruptRecord | ExcludedRecord) -> bytes:
    """Return a digest of the content of ``document``. All records without a document have the same one."""
    if isinstance(document, str):
        return hashlib.sha256(document.encode("utf-8", "surrogatepass")).digest()
    if isinstance(document, CorruptRecord | ExcludedRecord):
        return b""
    if isinstance(document, WeightedTokens):
        return digest_of_tokens(document.ids, document.weights, document.whole, document.parts, document.extras)
    return digest_of_tokens(document)


def digest_of_tokens(
    ids: Any,
    weights: Any = None,
    whole: bool = False,
    parts: tuple[int, ...] = (),
    extras: Mapping[str, Any] | None = None,
) -> bytes:
    """Return a digest of token ids, their weights as targets and their extra values.

    Args:
        whole: whether the document must not be cut.
        parts: see :class:`~titan_core.api.WeightedTokens`.
    """
    array = numpy.ascontiguousarray(ids)
    digest = hashlib.sha256(array.data)
    if weights is not None:
        digest.update(numpy.ascontiguousarray(weights, dtype="<f4").data)
    digest.update(f"{array.dtype.str}{whole}".encode())
    for name, values in sorted((extras or {}).items()):
        values = numpy.ascontiguousarray(values)
        digest.update(f"{name} {values.dtype.str} {values.shape}".encode())
        digest.update(values.tobytes())
    if parts:
        digest.update(f"{parts}".encode())
    return digest.digest()


class Witness(Late[bytes]):
    """The digest of a document that was read."""

    def __init__(self, document: Document | CorruptRecord | ExcludedRecord, before: State | None = None) -> None:
        """
        Args:
            before: position of the shard before the document.
        """
        super().__init__(digest_of, _unchanging(document))
        self.before = before
        # An error refers to all that was on the stack.
        if isinstance(document, CorruptRecord | ExcludedRecord) or (
            not isinstance(document, WeightedTokens) and len(document) > KEPT
        ):
            self.get()

    def sample(self) -> Any:
        """Return a part of the document, which is equal for equal documents; ``None`` if it is not known."""
        (content,) = self._arguments or (None,)
        if isinstance(content, str):
            return len(content), content[:_SAMPLE], content[-_SAMPLE:]
        if isinstance(content, numpy.ndarray):
            return len(content), content[:_SAMPLE].tobytes(), content[-_SAMPLE:].tobytes()
        return None


def _unchanging(document: Any) -> Any:
    """Return ``document`` without arrays that a source may write to again."""
    if isinstance(document, str | CorruptRecord | ExcludedRecord):
        return document
    if isinstance(document, WeightedTokens):
        extras = {name: _unchanging(values) for name, values in document.extras.items()}
        return replace(document, ids=_unchanging(document.ids), weights=_unchanging(document.weights), extras=extras)
    return document if isinstance(document, numpy.ndarray) and not document.flags.writeable else numpy.array(document)


def _witnessed(history: Sequence[Witness]) -> Sequence[Witness]:
    """Return the shortest run of the last documents in ``history`` that has :data:`DISTINCT` different ones."""
    for number in range(DISTINCT, len(history)):
        if number == LONGEST or _are_distinct(history[-number:]):
            return history[-number:]
    return history


def _are_distinct(witnesses: Sequence[Witness]) -> bool:
    samples = {witness.sample() for witness in witnesses}
    return len(samples - {None}) >= DISTINCT or len({witness.get() for witness in witnesses}) >= DISTINCT


def joined(digests: Iterable[bytes]) -> str:
    """Return one short digest of several, as a plain value."""
    return hashlib.sha256(b"".join(digests)).hexdigest()[:_CHARACTERS]


class WitnessedShard:
    """A :class:`~titan_core.api.DocumentShard` that checks where another one stands after a position is loaded.

    Its state is ``from``, the position of the other before the witnessed documents; ``documents``, their number; and their
    ``digest``: ``None`` if there are none, or :data:`ACCEPTED`.
    """

    def __init__(self, shard: DocumentShard, name: ShardName) -> None:
        self._shard, self._name = shard, name
        self._history: list[Witness] = []  # the witnessed documents, and some before them
        self._longest = _SPARE
        self._loaded: State | None = None  # until it is checked
        self._state: State | None = None
        self._now: State | None = None  # of the other shard, until more is read
        self._fresh = True  # whether the shard stands where it began

    def __iter__(self) -> WitnessedShard:
        return self

    def __next__(self) -> Document:
        """Return the next document.

        Raises:
            UserError: the shard does not stand where the loaded position says.
        """
        if self._loaded is not None:
            self._check(self._loaded)
        return self._read()

    def state_dict(self) -> State:
        """See :class:`~titan_core.api.DocumentShard`."""
        if self._loaded is not None:
            return self._loaded
        if self._state is None:
            self._now = self._shard.state_dict()
            self._state = cast("State", Late(_state_of, self._history.copy(), self._now))
        return self._state

    def load_state_dict(self, state: State) -> None:
        """See :class:`~titan_core.api.DocumentShard`. Reads nothing, because reading may fail."""
        state = computed(state)
        # A beginning has nothing before it that shows whether it was restored.
        if not self._fresh or state["from"] != self._shard.state_dict():
            self._shard.load_state_dict(state["from"])
            self._fresh = False
        self._history.clear()
        self._state = self._now = None
        self._loaded = state

    def place(self) -> DocumentPlace | None:
        """See :class:`~titan_core.api.DocumentShard`."""
        return place_of(self._shard)

    def _check(self, state: State) -> None:
        for _ in range(int(state["documents"])):
            try:
                self._read()
            except (CorruptRecord, ExcludedRecord):
                continue  # reported when it was first read
            except StopIteration:
                if state["digest"]:
                    raise self._name.displaced(state["from"], "the data ends before it") from None
                break
        if state["digest"] and _state_of(self._history, state)["digest"] != state["digest"]:
            why = f"the {state['documents']} records before it are not those that were read before it was saved"
            raise self._name.displaced(state["from"], why)
        self._loaded = None

    def _read(self) -> Document:
        try:
            before = self._shard.state_dict() if self._now is None else self._now
        except StopIteration as error:  # would pass for the end of the data
            raise RuntimeError("state_dict raised StopIteration") from error
        self._now, self._fresh = None, False
        try:
            document = require_document(next(self._shard))
        except (CorruptRecord, ExcludedRecord) as error:
            self._witness(Witness(error, before))
            raise
        self._witness(Witness(document, before))
        return document

    def _witness(self, witness: Witness) -> None:
        self._state = None
        self._history.append(witness)
        if len(self._history) > self._longest:
            self._history = list(_witnessed(self._history))
            self._longest = len(self._history) + _SPARE


def _state_of(history: Sequence[Witness], now: State) -> State:
    """Return the state of a shard that has read ``history`` and stands at ``now``."""
    found = _witnessed(history)
    if not found:
        return {"from": now, "documents": 0, "digest": None}
    return {"from": found[0].before, "documents": len(found), "digest": joined(one.get() for one in found)}


class WitnessedSource:
    """A source whose shards check where they stand."""

    def __init__(self, source: DocumentSource, name: str) -> None:
        """``name``: of the dataset."""
        self._source, self._name = source, name

    @property
    def num_documents(self) -> int | None:
        """See :class:`~titan_core.api.DocumentSource`."""
        return self._source.num_documents

    def shard(self, index: int, count: int, epoch: int) -> DocumentShard:
        """See :class:`~titan_core.api.DocumentSource`."""
        return WitnessedShard(self._source.shard(index, count, epoch), ShardName(self._name, index, count))


def without_witness(stream: State) -> State:
    """Return the position of a stream in one dataset (:class:`~titan_core.data.tokens.TokenStream`) with its digests
    :data:`ACCEPTED`."""
    document = stream["document"]
    shuffled = "begin" in document
    position = {**(document["begin"] if shuffled else document), "digest": ACCEPTED}
    return {**stream, "document": {**document, "begin": position} if shuffled else position, "digest": ACCEPTED}


def upgraded(stream: Any, first: State) -> Any:
    """Return the position of a stream in one dataset as it is, or in today's form if it was saved before positions had
    witnesses.

    Args:
        first: the position of its beginning.
    """
    if not isinstance(stream, dict) or stream.keys() != {"epoch", "document", "used"}:
        if not isinstance(stream, dict) or "digest" not in stream:
            return stream
        # Only positions among packed documents have these, and the user may have accepted another packing.
        return {key: stream.get(key) for key in first if key in ("length", "earlier") or key in stream} | {
            key: value for key, value in stream.items() if key not in ("length", "earlier")
        }
    document = stream["document"]
    if "begin" not in first["document"]:
        document = _unwitnessed(document)
    elif isinstance(document, dict) and "begin" in document:
        document = {**document, "begin": _unwitnessed(document["begin"])}
    return {**stream, "document": document, "digest": None}


def _unwitnessed(position: Any) -> State:
    return {"from": position, "documents": 0, "digest": None}
