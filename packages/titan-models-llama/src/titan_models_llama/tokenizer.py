"""Llama 3's tokenizer, based on ``tiktoken``. Its file lacks the pattern that splits a text, and the special tokens."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import tiktoken

from titan_core.api import TextTokenizer, TokenizerContext, UserError
from titan_core.api.data.tokenizer import without_surrogates
from titan_core.toolkit.byte_level import tokenizer_files
from titan_core.toolkit.files import LONGEST_TABLE, read_bytes

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

BEGIN_OF_TEXT = "<|begin_of_text|>"
END_OF_TEXT = "<|end_of_text|>"

# Splits text before byte pairs are merged, as published with Llama 3's tokenizer: contractions, words with one leading
# character, up to three digits, punctuation, line ends, blanks. Without this pattern, a tokenizer returns other ids.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Llama 3.1's special tokens, by offset from the first id after the ranks. The other offsets below 256 are reserved tokens.
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


_DOWNLOAD_LLAMA3 = (
    "run `titan tokenizer download meta-llama/Llama-3.1-8B`, "
    'and set model.tokenizer_path = "assets/tokenizer/tokenizer.model"'
)

_LONGEST_RUN = 25_000
_LONG_RUN = re.compile(rf"\s{{{_LONGEST_RUN}}}|\S{{{_LONGEST_RUN}}}")


class TiktokenTokenizer(TextTokenizer):
    """A ``tiktoken.Encoding`` that puts special tokens around documents."""

    def __init__(self, encoding: tiktoken.Encoding, pattern: str, begin: str, end: str) -> None:
        """
        Args:
            pattern: of the encoding, which has no public name for it.
            begin: the special token that begins a document.
            end: the special token that ends it.
        """
        self._encoding = encoding
        self._pattern, self._names = pattern, (begin, end)
        self._begin = encoding.encode_single_token(begin)
        self._end = encoding.encode_single_token(end)

    @property
    def vocab_size(self) -> int:
        """The largest id, plus one."""
        return self._encoding.n_vocab

    def marks(self) -> tuple[list[int], list[int]]:
        """The ids that begin and that end a document."""
        return [self._begin], [self._end]

    def encode_document(self, text: str) -> NDArray[numpy.uint32]:
        """Return the ids of ``text``, between the ids for begin and end of text."""
        import numpy  # here, because commands that tokenise nothing import this module

        try:
            pieces = [self._encode(piece) for piece in _pieces(text)]
        except UnicodeEncodeError:
            pieces = [self._encode(piece) for piece in _pieces(without_surrogates(text))]
        marks = numpy.array([self._begin, self._end], numpy.uint32)
        return numpy.concatenate([marks[:1], *pieces, marks[1:]])

    def _encode(self, text: str) -> NDArray[numpy.uint32]:
        # Avoids a list of Python integers. Text that looks like a special token is encoded as plain text.
        return self._encoding.encode_to_numpy(text, disallowed_special=())

    def tokenizer_files(self) -> dict[str, str]:
        """See :class:`~titan_core.api.TextTokenizer`."""
        encoding = self._encoding
        ranks = {token: encoding.encode_single_token(token) for token in encoding.token_byte_values()}
        special = {name: encoding.encode_single_token(name) for name in encoding.special_tokens_set}
        return tokenizer_files(ranks, special, self._pattern, *self._names)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, with U+FFFD for bytes that are not UTF-8."""
        return self._encoding.decode(list(ids))


def _pieces(text: str) -> Iterator[str]:
    """Yield ``text``, cut after each run that could overflow the stack of tiktoken's regular expressions, which panic at a
    million blanks. Text without long runs is not cut, so its ids do not change."""
    if not _may_have_long_run(text):
        yield text
        return
    start = 0
    for run in _LONG_RUN.finditer(text):
        yield text[start : run.end()]
        start = run.end()
    yield text[start:]


def _may_have_long_run(text: str) -> bool:
    """Whether ``text`` may have a long run, which would fill one of these blocks. Much faster than searching for one."""
    size = _LONGEST_RUN // 2
    blocks = (text[start : start + size] for start in range(0, len(text) - size + 1, size))
    return len(text) >= _LONGEST_RUN and any(block.isspace() or len(block.split(None, 1)) == 1 for block in blocks)


def build(context: TokenizerContext[None]) -> TiktokenTokenizer:
    """Return the tokenizer of Llama 3's ``tokenizer.model``: tiktoken's rank file, then 256 special tokens.

    Raises:
        UserError: No path is set, or the file is not a rank file, or has special tokens of its own.
    """
    if context.path is None:
        raise UserError.one("model.tokenizer_path", "tokenizer 'llama3' needs Llama 3's tokenizer.model", _DOWNLOAD_LLAMA3)
    path = _file_at(context.path)
    if (about := path.with_name(f"{path.name}.json")).exists():
        why = f"is not Llama 3's: {about.name} beside it describes other special tokens"
        raise UserError.one(str(path), why, 'set model.tokenizer = "hf" and model.tokenizer_path to its tokenizer.json')
    ranks = read_rank_file(path, _DOWNLOAD_LLAMA3)
    first = max(ranks.values()) + 1
    reserved = iter(range(_LLAMA3_NUM_SPECIAL))
    special = {
        _LLAMA3_NAMED.get(offset) or f"<|reserved_special_token_{next(reserved)}|>": first + offset
        for offset in range(_LLAMA3_NUM_SPECIAL)
    }
    encoding = tiktoken.Encoding("llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    return TiktokenTokenizer(encoding, LLAMA3_PATTERN, BEGIN_OF_TEXT, END_OF_TEXT)


def _file_at(path: str) -> Path:
    """Return the rank file at ``path``, a file or the folder that contains a ``tokenizer.model``."""
    file = Path(path).expanduser()
    return file / "tokenizer.model" if file.is_dir() else file


def read_rank_file(path: Path, fix: str) -> dict[bytes, int]:
    """Read a file in tiktoken's format: a base64 token and its rank on each line.

    ``tiktoken.load`` caches files by path, and so does not notice that a file has changed.

    Args:
        fix: the fix for a missing file, for the error.

    Raises:
        UserError: The file cannot be read, or is not a rank file.
    """
    try:
        lines = read_bytes(path, longest=LONGEST_TABLE).splitlines()
    except FileNotFoundError:
        raise UserError.one(str(path), "no such file", fix, missing=True) from None
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
                "is not a line of a rank file, which has a base64 token and its rank on each line",
                f'for a tokenizer.json, set model.tokenizer = "hf"; for Llama 3\'s tokenizer.model, {_DOWNLOAD_LLAMA3}',
            ) from None
    if any(bytes([byte]) not in ranks for byte in range(256)) or len(set(ranks.values())) != len(ranks):
        raise UserError.one(
            str(path),
            "is not a rank file: a byte has no rank, or two tokens have the same rank",
            f"download it again: {fix}",
        )
    return ranks
