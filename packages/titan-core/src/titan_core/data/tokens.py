"""Documents to token sequences: one endless stream for each logical shard."""

from __future__ import annotations

import logging
from typing import Literal

from titan_core.data.source import DocumentShard, DocumentSource, State
from titan_core.errors import UserError
from titan_core.tokenizers.tokenizer import TextTokenizer

log = logging.getLogger(__name__)


class TokenStream:
    """Documents of one logical shard, each between its begin and end tokens, one after another, cut into windows.

    The state is the position of the document that is being cut, and how many of its tokens are used up: what is
    tokenised but not consumed is tokenised again after a restore, so nothing is lost and nothing comes twice.
    """

    def __init__(
        self,
        source: DocumentSource,
        tokenizer: TextTokenizer,
        index: int,
        count: int,
        on_end: Literal["repeat", "stop"],
        name: str,
    ) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._index = index
        self._count = count
        self._on_end = on_end
        self._name = name
        self._go_to(epoch=0)
        self._position: State = {"epoch": 0, "document": self._document_state, "used": 0}

    @property
    def epoch(self) -> int:
        """How many times the shard was read to its end."""
        return self._epoch

    def take(self, length: int) -> list[int] | None:
        """The next ``length`` tokens, or ``None`` where the shard ends before them and is not to be repeated."""
        while len(self._buffer) - self._used < length:
            if not self._read_document():
                return None
        window = self._buffer[self._used : self._used + length]
        self._used += length
        # What is left in the buffer belongs to the last document alone: before it, there was too little for a window.
        self._position = {
            "epoch": self._epoch,
            "document": self._document_state,
            "used": self._used - self._document_start,
        }
        return window

    def state_dict(self) -> State:
        """The position after the last window that was taken."""
        return self._position

    def load_state_dict(self, state: State) -> None:
        """Go on from a position that :meth:`state_dict` gave."""
        self._go_to(state["epoch"])
        self._shard.load_state_dict(state["document"])
        self._position = state
        if state["used"]:
            self._read_document()
            self._used = int(state["used"])

    def _go_to(self, epoch: int) -> None:
        self._epoch = epoch
        self._shard: DocumentShard = self._source.shard(self._index, self._count, epoch)
        self._tokens_read = 0
        self._document_start = 0  # where in the buffer the last document begins
        self._document_state = self._shard.state_dict()  # the shard's position before that document
        self._buffer: list[int] = []
        self._used = 0

    def _read_document(self) -> bool:
        """Append the next document's tokens to the buffer; ``False`` where there is none and none will come."""
        state = self._shard.state_dict()
        text = next(self._shard, None)
        if text is None:
            return self._begin_next_epoch()
        del self._buffer[: self._used]
        self._used = 0
        self._document_start = len(self._buffer)
        self._document_state = state
        tokens = self._tokenizer.encode_document(text)
        self._tokens_read += len(tokens)
        self._buffer += tokens
        return True

    def _begin_next_epoch(self) -> bool:
        if self._on_end == "stop":
            return False
        if self._tokens_read == 0:
            raise UserError.one(
                f"dataset {self._name!r}",
                f"logical shard {self._index} of {self._count} has no tokens",
                "lower data.logical_shards (or training.global_batch_size), or give more documents",
            )
        if self._index == 0:
            log.info("dataset %r has ended; reading it again (epoch %d)", self._name, self._epoch + 2)
        leftover = self._buffer[self._used :]
        self._go_to(self._epoch + 1)
        self._buffer = leftover
        return True
