"""The embedded tokenizer: an id for each byte of UTF-8, and two marks. Needs no file and no library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from titan_core.api.errors import UserError
from titan_core.api.tokenizer import TokenizerContext, without_surrogates

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

_MARKS: Final = {256: "<|begin_of_text|>", 257: "<|end_of_text|>"}


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 begins a document and 257 ends it."""

    vocab_size = 258

    @property
    def begin_ids(self) -> list[int]:
        """What a document begins with."""
        return [256]

    @property
    def end_ids(self) -> list[int]:
        """What a document ends with."""
        return [257]

    def encode_document(self, text: str) -> NDArray[numpy.uint32]:
        """The ids of ``text`` between begin and end of text."""
        import numpy  # not with this module, which commands import that tokenise nothing

        try:
            data = text.encode()
        except UnicodeEncodeError:
            data = without_surrogates(text).encode()
        ids = numpy.empty(len(data) + 2, numpy.uint32)
        ids[0], ids[1:-1], ids[-1] = 256, numpy.frombuffer(data, numpy.uint8), 257
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; bytes that are not UTF-8 are shown as U+FFFD."""
        return b"".join(_MARKS[one].encode() if one in _MARKS else bytes([one]) for one in ids).decode(errors="replace")


def build(context: TokenizerContext[None]) -> ByteTokenizer:
    """The default.

    Raises:
        UserError: a path was given, which says that another tokenizer was meant.
    """
    if context.path is not None:
        raise UserError.one(
            context.path, "tokenizer 'byte' takes no file", "set model.tokenizer to another one, or drop the path"
        )
    return ByteTokenizer()
