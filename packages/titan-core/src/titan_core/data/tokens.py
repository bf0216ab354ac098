"""Documents to token sequences: one stream per dataset and logical shard. Free of torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy
from numpy.typing import NDArray

from titan_core.api import Document, DocumentShard, DocumentSource, ExtraField, TextTokenizer, UserError, WeightedTokens
from titan_core.api.data.dataset import OnEnd, State, encode_text
from titan_core.api.data.replay import ReadDocument, UsedTokens
from titan_core.api.data.tokenizer import token_ids
from titan_core.api.plugins.ref import CodeOrigin
from titan_core.data.extras import checked_extras
from titan_core.data.window import Window
from titan_core.toolkit.reading import DocumentReader, place_of
from titan_core.toolkit.stream_check import ShardName, StreamCheck, digest_of

log = logging.getLogger(__name__)
T = TypeVar("T")


class TokenStream:
    """The documents of one logical shard, each between begin and end tokens, concatenated and cut into windows.

    Empty documents are skipped and counted; they would only teach a model that a begin may be followed by nothing.

    The state is where the last records begin, their number, of which the last is the current document, the number of its
    tokens already used, and a digest of all of these. They are read and tokenised again after a restore, so no token is lost
    or repeated (:mod:`titan_core.toolkit.stream_check`).
    """

    def __init__(
        self,
        source: DocumentSource,
        tokenizer: TextTokenizer,
        index: int,
        count: int,
        on_end: OnEnd,
        name: str,
        reader: DocumentReader,
        origins: tuple[CodeOrigin | None, CodeOrigin | None] = (None, None),
        extras: Mapping[str, ExtraField] | None = None,
        traced: bool = False,
        excluded: frozenset[int] = frozenset(),
    ) -> None:
        """
        Args:
            origins: the plugins of the source and of the tokenizer, for errors.
            extras: the extra tensors that the documents fill.
            excluded: indices of documents that are passed over.
            traced: whether windows have :attr:`~titan_core.data.window.Window.used`.
        """
        self._traced, self._excluded = traced, excluded
        self._fields = extras or {}
        self._alone = not all(extra.sequence for extra in self._fields.values())  # each document in a sequence of its own
        self._source = source
        self._tokenizer = tokenizer
        self._index = index
        self._count = count
        self._on_end = on_end
        self._name = name
        self._shard_name = ShardName(name, index, count)
        self._reader = reader
        self._origins = origins
        self._vocab_size = tokenizer.vocab_size
        self.documents = self.cut = 0
        """Number of documents in the sequences so far, and of those that no sequence has as a whole."""
        self._nothing = numpy.asarray(self._of_tokenizer("encode_document", tokenizer.encode_document, ""))
        self._start_epoch(epoch=0)
        self._position = self._position_now()

    @property
    def epoch(self) -> int:
        """Number of times that the shard was read to its end."""
        return self._epoch

    def take(self, length: int) -> Window | None:
        """Return the next ``length`` tokens, or fewer if the following document must not be cut. At the end of the shard
        ``on_end`` decides: repeat it, return ``None``, or return the remaining tokens first."""
        window = Window([])
        missing = length
        while missing and not (self._alone and window.pieces):
            if self._used == len(self._document) and not self._read_document():
                if self._on_end == "stop" or not window.pieces:
                    return None
                break
            if self._whole and self._used == 0 and len(self._document) > missing:
                self._require_to_fit(length)
                break
            for count in self._parts or (missing,):
                missing -= self._use(window, count)
        self._position = self._position_now()
        return window

    def _use(self, window: Window, count: int) -> int:
        """Append the next ``count`` tokens of the document to ``window``, or the rest of it; return their number."""
        used = slice(self._used, min(self._used + count, len(self._document)))
        piece, weights = self._document[used], self._weights
        if len(piece):
            if self._used == 0:
                self.documents += 1
                self.cut += len(piece) < len(self._document) and not self._parts
            window.pieces.append(piece)
            window.weights.append(None if weights is None else weights[used])
            fields = self._fields
            window.extras.append({n: one[used] if fields[n].sequence else one for n, one in self._extras.items()})
            if self._read is not None:
                window.used.append(UsedTokens(self._read, used.start, len(piece)))
        self._used += len(piece)
        return len(piece)

    def state_dict(self) -> State:
        """Return the position after the last window."""
        return self._position

    def load_state_dict(self, state: State) -> None:
        """Resume from a position that :meth:`state_dict` returned.

        Raises:
            UserError: other documents are there than when the position was saved.
        """
        self._restore(state)
        if not state["records"]:
            return  # nothing has been read yet
        self._next_document(again=True)
        self._used = min(int(state["used"]), len(self._document))
        if state["digest"] not in (None, self._position_now()["digest"]):
            raise self._shard_name.mismatch(state)

    def _restore(self, state: State) -> None:
        """Go to the last of the records of a position. Reads nothing."""
        self._start_epoch(state["epoch"])
        if state["records"]:
            self._check = StreamCheck(self._shard_name, state["document"], state["records"] - 1)
        self._tokens_read = state["records"]  # the shard is not empty, even if none are left in other data
        self._position = state

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._shard: DocumentShard = self._of_source("shard", self._source.shard, self._index, self._count, epoch)
        self._tokens_read = self._empty = 0
        self._check = StreamCheck(self._shard_name, self._of_source("state_dict", self._shard.state_dict))
        self._begin, self._records = self._check.position, 0  # records up to the current document, and their digest
        self._document: NDArray[Any] = numpy.empty(0, numpy.uint32)
        self._content: int | None = None  # a digest of it
        self._read: ReadDocument | None = None  # the current document, if the stream is traced
        self._weights: NDArray[Any] | None = None
        self._extras: Mapping[str, NDArray[Any]] = {}
        self._parts: tuple[int, ...] = ()
        self._whole = False
        self._used = 0

    def _position_now(self) -> State:
        digest = None
        if self._begin["records"]:
            digest = f"{digest_of(f'{self._records} {self._digest()} {self._epoch} {self._used}'):08x}"
        return {"epoch": self._epoch, **self._begin, "used": self._used, "digest": digest}

    def _digest(self) -> int:
        """Return a digest of the current document, as it is used."""
        if self._content is None:  # once for a document that fills several windows
            ids, weights = self._document, self._weights
            self._content = digest_of(
                ids if weights is None else WeightedTokens(ids, weights, self._whole, self._parts, self._extras)
            )
        return self._content

    def _read_document(self) -> bool:
        """Read the next document with tokens, or begin the next epoch; return ``False`` if the data has ended."""
        return self._next_document() or self._begin_next_epoch()

    def _next_document(self, again: bool = False) -> bool:
        """Read the next document with tokens; return ``False`` at the end of the epoch.

        Args:
            again: whether it is the one that was in use when the position was saved, and stays even if it is excluded.
        """
        while True:
            document = self._of_source("__next__", self._reader.next, self._shard, self._check)
            if document is None:
                return False
            if self._excluded and not again and (place := place_of(self._shard)) and place.index in self._excluded:
                continue
            tokens, weights, extras = self._tokens_of(document)
            if len(tokens) and not numpy.array_equal(tokens, self._nothing):
                break
            self._empty += 1
            self._reader.count_empty()
        self._document, self._weights, self._extras, self._content = tokens, weights, extras, None
        self._parts = document.parts if isinstance(document, WeightedTokens) else ()
        self._whole = self._alone or (isinstance(document, WeightedTokens) and document.whole)
        self._read = ReadDocument(self._epoch, place_of(self._shard), len(tokens)) if self._traced else None
        self._begin, self._records = self._check.position, self._check.digest
        self._tokens_read += len(tokens)
        self._used = 0
        return True

    def _require_to_fit(self, length: int) -> None:
        """
        Raises:
            UserError: the current document, which must not be cut, has more than ``length`` tokens.
        """
        if len(self._document) > length:
            why = f"has {len(self._document)} tokens and must not be cut, but a sequence has room for {length}"
            raise UserError.one(self._place(), why, "fix the plugin of the dataset, which returned it")

    def _tokens_of(self, document: Document) -> tuple[NDArray[Any], NDArray[Any] | None, Mapping[str, NDArray[Any]]]:
        """Return the document's ids, their weights as targets, and its extra values.

        Raises:
            PluginFailure: an id is outside of the vocabulary, or the weights, the parts or the extra values are invalid.
        """
        try:
            if isinstance(document, WeightedTokens):
                ids = token_ids(document.ids, self._vocab_size)
                weights = _checked_weights(document.weights, len(ids))
                if document.parts and not (document.whole and min(document.parts) > 0 and sum(document.parts) == len(ids)):
                    raise ValueError(
                        f"its parts, {document.parts}, must be whole and have its {len(ids)} tokens between them"
                    )
                return ids, weights, checked_extras(document.extras, self._fields, len(ids))
            tokens: Any = document
            if isinstance(document, str):
                tokens = self._of_tokenizer("encode_document", encode_text, self._tokenizer, document)
            return token_ids(tokens, self._vocab_size), None, checked_extras({}, self._fields, 0)
        except ValueError as error:
            origin = self._origins[isinstance(document, str)]
            if origin is not None:
                raise origin.failure(f"{self._place()}: {error}") from None
            fix = f"fix the plugin of the {'tokenizer' if isinstance(document, str) else 'dataset'}, which returned them"
            raise UserError.one(self._place(), str(error), fix) from None

    def _of_source(self, what: str, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function of the source or its shard: what it raises names its plugin, in a worker process too."""
        origin = self._origins[0]
        return function(*arguments) if origin is None else origin.call(what, function, *arguments)

    def _of_tokenizer(self, what: str, function: Callable[..., T], *arguments: Any) -> T:
        origin = self._origins[1]
        return function(*arguments) if origin is None else origin.call(what, function, *arguments)

    def _place(self) -> str:
        return f"{self._shard_name}, document at {self._check.before}"

    def _begin_next_epoch(self) -> bool:
        if self._on_end == "once":
            return False
        where, shard = f"dataset {self._name!r}", f"logical shard {self._index} of {self._count}"
        if self._tokens_read == 0 and self._reader.excluded:
            fix = "change these settings or the records, or raise training.seq_len"
            raise UserError.one(where, f"its settings exclude every record of {shard} (see the log)", fix)
        if self._tokens_read == 0 and self._empty:
            fix = "check data.text_field (or data.format), or add documents with text"
            raise UserError.one(where, f"all {self._empty:,} documents of {shard} are empty", fix)
        if self._on_end != "repeat":
            return False
        if self._tokens_read == 0:
            fix = "lower data.logical_shards (or training.global_batch_size), or add documents"
            raise UserError.one(where, f"{shard} has no tokens", fix)
        begins = self._epoch + 2  # counted from 1
        if self._index == 0 and begins.bit_count() == 1:  # 2, 4, 8 ...: a small dataset may end in each step
            log.info("dataset %r has ended; reading it again (epoch %d)", self._name, begins)
        self._start_epoch(self._epoch + 1)
        return True


def _checked_weights(weights: Any, count: int) -> NDArray[Any]:
    """Return ``weights`` as fp32.

    Raises:
        ValueError: the shape is not ``(count,)``, or a weight is negative or not finite.
    """
    result = numpy.asarray(weights, dtype=numpy.float32)
    if result.shape != (count,):
        raise ValueError(f"its weights have shape {result.shape}, but it has {count} tokens")
    if not (numpy.isfinite(result).all() and (result >= 0).all()):
        raise ValueError("its weights must all be finite and at least 0")
    return result
