"""Tokenizers: what they are to the core, what tells two apart, and what the ids that they give must be. Free of torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from titan_core.api.build_context import BuildContext, S

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PROBE = """The quick brown fox can't jump over 1234567890 lazy dogs; naïve café, Übergröße — don't!
\tdef f(x: int = 0) -> None:\n        return x ** 2  # comment\r\n\r\n
https://example.org/?a=1&b=%20  ÀÉÎÕÜ Привет мир, 你好世界 こんにちは مرحبا 🙂🚀   internationalization
"""


@dataclass(frozen=True)
class TokenizerContext(BuildContext[S]):
    """What a tokenizer is built with. It travels to worker processes."""

    path: str | None
    """``model.tokenizer_path``."""


class TextTokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    def encode_document(self, text: str) -> list[int] | NDArray[Any]:
        """The ids of a whole document, with the tokens that mark its begin and end. Special tokens' names inside the text
        are plain text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens shown by name."""
        ...


@runtime_checkable
class DescribesMarks(Protocol):
    """A tokenizer that found out which tokens mark documents, and can say from where."""

    def describe_marks(self) -> list[str]:
        """A line for the begin and one for the end."""
        ...


def fingerprint(tokenizer: TextTokenizer) -> str:
    """A digest of the vocabulary's size and of the ids of a text of many kinds of characters: two tokenizers that have it in
    common may stand for each other."""
    ids = [int(token) for token in tokenizer.encode_document(_PROBE)]
    return hashlib.sha256(repr((tokenizer.vocab_size, ids)).encode()).hexdigest()[:16]


def token_ids(tokens: Sequence[int] | NDArray[Any], vocab_size: int) -> NDArray[Any]:
    """A document's ids as an array of whole numbers, each from 0 to ``vocab_size - 1``: an id beyond the embedding's rows
    ends a run with no word about its origin, and breaks a GPU's context.

    Raises:
        ValueError: they are something else; with the first id that is.
    """
    import numpy  # not with this module, which commands import that tokenise nothing

    ids = numpy.asarray(tokens)
    if ids.size == 0:
        return numpy.empty(0, numpy.uint32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"it is an array {list(ids.shape)} of {ids.dtype}, not a list of token ids")
    if ids.max() >= vocab_size or ids.min() < 0:
        place = int(numpy.flatnonzero((ids >= vocab_size) | (ids < 0))[0])
        raise ValueError(f"token {place} has the id {ids[place]}, and the vocabulary ends at {vocab_size - 1}")
    return ids


def without_surrogates(text: str) -> str:
    """``text`` with surrogate pairs joined and halves (``"\\ud83d"`` in JSON), which no tokenizer can encode, replaced by
    U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
