"""The embedded tokenizer: one id per UTF-8 byte, and two special ids. Needs no file and no library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from titan_core.api import TextTokenizer, TokenizerContext, UserError
from titan_core.api.data.tokenizer import without_surrogates
from titan_core.toolkit.byte_level import tokenizer_files

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

_MARKS: Final = {256: "<|begin_of_text|>", 257: "<|end_of_text|>"}


class ByteTokenizer(TextTokenizer):
    """Ids 0 to 255 are bytes, 256 begins a document and 257 ends it."""

    vocab_size = 258

    def encode_document(self, text: str) -> NDArray[numpy.uint32]:
        """Return the ids of ``text`` between the begin and end ids."""
        import numpy  # here, because commands that tokenise nothing import this module

        try:
            data = text.encode()
        except UnicodeEncodeError:
            data = without_surrogates(text).encode()
        ids = numpy.empty(len(data) + 2, numpy.uint32)
        ids[0], ids[1:-1], ids[-1] = 256, numpy.frombuffer(data, numpy.uint8), 257
        return ids

    def tokenizer_files(self) -> dict[str, str]:
        """See :class:`~titan_core.api.TextTokenizer`."""
        special = {name: number for number, name in _MARKS.items()}
        return tokenizer_files({bytes([byte]): byte for byte in range(256)}, special, None, _MARKS[256], _MARKS[257])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(_MARKS[token].encode() if token in _MARKS else bytes([token]) for token in ids).decode(
            errors="replace"
        )


def build(context: TokenizerContext[None]) -> ByteTokenizer:
    """Build the byte tokenizer.

    Raises:
        UserError: ``model.tokenizer_path`` is set, so another tokenizer was intended.
    """
    if context.path is not None:
        raise UserError.one(
            context.path,
            "tokenizer 'byte' takes no file",
            "set model.tokenizer to the tokenizer of this file, or remove the path (--model.tokenizer_path=)",
        )
    return ByteTokenizer()
