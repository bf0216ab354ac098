"""Llama 3's tokenizer and others in its format, based on ``tiktoken``.

A rank file contains neither the pattern that splits a text nor the special tokens. Llama 3's are built in. Those of other
files are described beside them, in ``FILE.json`` (``titan tokenizer train`` writes one)::

    {"pattern": "...", "begin": "<s>", "end": "</s>", "special_tokens": {"<s>": 32000, "</s>": 32001}}
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import tiktoken
from pydantic import BaseModel, ConfigDict, ValidationError

from titan_core.api import TokenizerContext, UserError
from titan_core.toolkit.byte_level import tokenizer_files
from titan_core.toolkit.plain_json import read_object
from titan_core.toolkit.text import show_mistakes
from titan_core.toolkit.tokenizers import without_surrogates

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
_BYTES = {bytes([byte]): byte for byte in range(256)}

_LONGEST_RUN = 25_000
_LONG_RUN = re.compile(rf"\s{{{_LONGEST_RUN}}}|\S{{{_LONGEST_RUN}}}")


class TiktokenTokenizer:
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

    @property
    def begin_ids(self) -> list[int]:
        """Ids that begin a document."""
        return [self._begin]

    @property
    def end_ids(self) -> list[int]:
        """Ids that end a document."""
        return [self._end]

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

    def encode_with_special_tokens(self, text: str) -> list[int]:
        """Return the ids of ``text``. Names of special tokens stand for those tokens."""
        return self._encoding.encode(text, allowed_special="all")

    def tokenizer_files(self) -> dict[str, str]:
        """See :class:`~titan_core.api.ExportsTokenizer`."""
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
    if (about := _description_of(path)).exists():
        why = f"is not Llama 3's: {about.name} beside it describes other special tokens"
        raise UserError.one(str(path), why, 'set model.tokenizer = "tiktoken"')
    ranks = read_rank_file(path, _DOWNLOAD_LLAMA3)
    first = max(ranks.values()) + 1
    reserved = iter(range(_LLAMA3_NUM_SPECIAL))
    special = {
        _LLAMA3_NAMED.get(offset) or f"<|reserved_special_token_{next(reserved)}|>": first + offset
        for offset in range(_LLAMA3_NUM_SPECIAL)
    }
    encoding = tiktoken.Encoding("llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    return TiktokenTokenizer(encoding, LLAMA3_PATTERN, BEGIN_OF_TEXT, END_OF_TEXT)


def build_described(context: TokenizerContext[None]) -> TiktokenTokenizer:
    """Return the tokenizer of a rank file and the description beside it.

    Raises:
        UserError: No path is set, or one of the two files is missing or invalid.
    """
    if context.path is None:
        why = "tokenizer 'tiktoken' needs a file with tiktoken's ranks"
        raise UserError.one("model.tokenizer_path", why, "set it to the file; `titan tokenizer train` writes one")
    path = _file_at(context.path)
    ranks = read_rank_file(path, "check the path, or train one (`titan tokenizer train`)")
    about = _description_of(path)
    if not about.exists():
        why = f"has no description: {about.name} must name the pattern and the special tokens of {path.name}"
        raise UserError.one(str(about), why, 'for Llama 3\'s file, set model.tokenizer = "llama3"')
    description = _read_description(about, ranks)
    encoding = tiktoken.Encoding(
        path.name,
        pat_str=description.pattern,
        mergeable_ranks=ranks,
        special_tokens=description.special_tokens,
    )
    return TiktokenTokenizer(encoding, description.pattern, description.begin, description.end)


class _Description(BaseModel):
    """What a rank file leaves out."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    pattern: str
    """The regular expression that splits a text before bytes are merged."""
    begin: str
    """The special token that begins a document."""
    end: str
    """The special token that ends a document."""
    special_tokens: dict[str, int]
    """Id of each special token."""


def _file_at(path: str) -> Path:
    """Return the rank file at ``path``, a file or the folder that contains a ``tokenizer.model``."""
    file = Path(path).expanduser()
    return file / "tokenizer.model" if file.is_dir() else file


def _description_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _read_description(file: Path, ranks: dict[bytes, int]) -> _Description:
    """Read and check the description of a rank file.

    Raises:
        UserError: It is not one, or does not fit the ranks.
    """
    fix = "write the tokenizer again"
    try:
        found = _Description.model_validate(read_object(file, fix))
    except ValidationError as error:
        raise UserError.one(str(file), show_mistakes(error), fix) from None
    ids = list(found.special_tokens.values())
    for name in ("begin", "end"):
        if getattr(found, name) not in found.special_tokens:
            raise UserError.one(str(file), f"{name} is {getattr(found, name)!r}, which is not in special_tokens", fix)
    if len(set(ids)) != len(ids) or min(ids) < 0 or not set(ids).isdisjoint(ranks.values()):
        why = "a special token has the id of another token, or a negative one"
        raise UserError.one(str(file), why, fix)
    try:
        tiktoken.Encoding("pattern", pat_str=found.pattern, mergeable_ranks=_BYTES, special_tokens={}).encode_ordinary("a b")
    except ValueError as error:
        raise UserError.one(str(file), f"pattern is not a regular expression: {error}", fix) from None
    return found


def read_rank_file(path: Path, fix: str) -> dict[bytes, int]:
    """Read a file in tiktoken's format: a base64 token and its rank on each line.

    ``tiktoken.load`` caches files by path, and so does not notice that a file has changed.

    Args:
        fix: the fix for a missing file, for the error.

    Raises:
        UserError: The file cannot be read, or is not a rank file.
    """
    try:
        lines = path.read_bytes().splitlines()
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
