"""Hugging Face's ``tokenizer.json``, through ``tokenizers`` (an extra: ``titan-core[tokenizers]``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titan_core.errors import UserError
from titan_core.tokenizers.surrogates import without_surrogates

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BEGINS = ("<|begin_of_text|>", "<s>", "[CLS]", "<bos>")
_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "[SEP]", "<eos>")


class HuggingFaceTokenizer:
    """A ``tokenizers.Tokenizer``. Documents are marked by its begin and end tokens, as far as it has any."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # A document that quotes "<|end_of_text|>" does not end there.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._begin = self._first_of(_BEGINS)
        self._end = self._first_of(_ENDS)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode_document(self, text: str) -> list[int]:
        """The ids of ``text`` between begin and end of text."""
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError):  # which of them depends on the version
            ids = self._tokenizer.encode(without_surrogates(text), add_special_tokens=False).ids
        return [*self._begin, *ids, *self._end]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def _first_of(self, names: tuple[str, ...]) -> list[int]:
        found = [self._tokenizer.token_to_id(name) for name in names]
        return [token for token in found if token is not None][:1]


def build_hf(path: str | None) -> HuggingFaceTokenizer:
    """Read ``path``, a ``tokenizer.json`` or the folder that holds one.

    Raises:
        UserError: no such file, not a tokenizer, or ``tokenizers`` is not installed.
    """
    if path is None:
        raise UserError.one("model.tokenizer_path", "tokenizer 'hf' needs a tokenizer.json", "set model.tokenizer_path")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UserError.one(
            "tokenizer 'hf'", "the package tokenizers is not installed", "`uv pip install 'titan-core[tokenizers]'`"
        ) from None
    file = Path(path).expanduser()
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise UserError.one(str(file), "no such file", "check the path")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for a file that it cannot parse
        raise UserError.one(
            str(file), f"not a tokenizer.json: {error}", "give the file of a Hugging Face tokenizer"
        ) from None
    return HuggingFaceTokenizer(tokenizer)
