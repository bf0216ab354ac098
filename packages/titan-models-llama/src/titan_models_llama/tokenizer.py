"""Llama 3's tokenizer, on ``tiktoken``."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import tiktoken

from titan_core.api.errors import UserError
from titan_core.api.tokenizer import TokenizerContext, without_surrogates

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

BEGIN_OF_TEXT = "<|begin_of_text|>"
END_OF_TEXT = "<|end_of_text|>"

# How text is cut before pairs of bytes are merged, as published with Llama 3's tokenizer: contractions, words with one
# leading character, up to three digits, punctuation, line ends, blanks. A tokenizer without it gives other ids.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Llama 3.1's special tokens, in the order of their ids, which follow the ranks; the rest of 256 are reserved ones.
_LLAMA3_NAMED = {
    0: BEGIN_OF_TEXT,
    1: END_OF_TEXT,
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}
_LLAMA3_NUM_SPECIAL = 256


_LONGEST_RUN = 25_000
_LONG_RUN = re.compile(rf"\s{{{_LONGEST_RUN}}}|\S{{{_LONGEST_RUN}}}")


class TiktokenTokenizer:
    """A ``tiktoken.Encoding`` with Llama's marks around documents."""

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self._encoding = encoding
        self._begin = encoding.encode_single_token(BEGIN_OF_TEXT)
        self._end = encoding.encode_single_token(END_OF_TEXT)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self._encoding.n_vocab

    @property
    def begin_ids(self) -> list[int]:
        """What a document begins with."""
        return [self._begin]

    @property
    def end_ids(self) -> list[int]:
        """What a document ends with."""
        return [self._end]

    def encode_document(self, text: str) -> NDArray[numpy.uint32]:
        """The ids of ``text`` between begin and end of text."""
        import numpy  # not with this module, which commands import that tokenise nothing

        try:
            pieces = [self._encode(piece) for piece in _pieces(text)]
        except UnicodeEncodeError:
            pieces = [self._encode(piece) for piece in _pieces(without_surrogates(text))]
        marks = numpy.array([self._begin, self._end], numpy.uint32)
        return numpy.concatenate([marks[:1], *pieces, marks[1:]])

    def _encode(self, text: str) -> NDArray[numpy.uint32]:
        # Without a list of Python's integers; what is written like a special token is plain text.
        return self._encoding.encode_to_numpy(text, disallowed_special=())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; bytes that are not UTF-8 are shown as U+FFFD."""
        return self._encoding.decode(list(ids))


def _pieces(text: str) -> Iterator[str]:
    """``text``, cut after runs so long that tiktoken's regular expressions overflow their stack (it panics at a million
    blanks); a text without one stays whole, and so do its ids."""
    if not _may_have_long_run(text):
        yield text
        return
    start = 0
    for run in _LONG_RUN.finditer(text):
        yield text[start : run.end()]
        start = run.end()
    yield text[start:]


def _may_have_long_run(text: str) -> bool:
    """A quick look, much quicker than the regular expression: a long run fills at least one of these blocks whole."""
    size = _LONGEST_RUN // 2
    blocks = (text[start : start + size] for start in range(0, len(text) - size + 1, size))
    return len(text) >= _LONGEST_RUN and any(block.isspace() or len(block.split(None, 1)) == 1 for block in blocks)


def build(context: TokenizerContext[None]) -> TiktokenTokenizer:
    """Llama 3's ``tokenizer.model``: tiktoken's rank file, and 256 special tokens after its last rank.

    Raises:
        UserError: no file, or not a rank file.
    """
    if context.path is None:
        raise UserError.one(
            "model.tokenizer_path", "tokenizer 'llama3' needs its tokenizer.model", "set model.tokenizer_path"
        )
    ranks = read_rank_file(Path(context.path))
    first = max(ranks.values()) + 1
    reserved = iter(range(_LLAMA3_NUM_SPECIAL))
    special = {
        _LLAMA3_NAMED.get(place) or f"<|reserved_special_token_{next(reserved)}|>": first + place
        for place in range(_LLAMA3_NUM_SPECIAL)
    }
    return TiktokenTokenizer(
        tiktoken.Encoding("llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    )


def read_rank_file(path: Path) -> dict[bytes, int]:
    """tiktoken's file format: a base64 token and its rank on each line.

    ``tiktoken.load`` reads it too, but through a cache keyed by path, which does not see that a file has changed.

    Raises:
        UserError: not there, or a line that is something else.
    """
    try:
        lines = path.expanduser().read_bytes().splitlines()
    except OSError as error:
        raise UserError.one(str(path), f"cannot be read: {error.strerror}", "check the path") from None
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError.one(
                f"{path}:{number}",
                "not a rank file: each line must be a base64 token and its rank",
                "give Llama 3's original tokenizer.model (Hugging Face's tokenizer.json is read by model.tokenizer = 'hf')",
            ) from None
    if any(bytes([byte]) not in ranks for byte in range(256)) or len(set(ranks.values())) != len(ranks):
        raise UserError.one(str(path), "not a rank file: a byte has no rank, or two tokens share one", "download it again")
    return ranks
