"""Tokenizers: their base classes, and checks of the ids that they return. Free of torch."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from titan_core.api.plugins.job import BuildContext, S
from titan_core.api.plugins.ref import Ref

if TYPE_CHECKING:
    import datetime

    from numpy.typing import NDArray

_PROBE = """The quick brown fox can't jump over 1234567890 lazy dogs; naïve café, Übergröße — don't!
\tdef f(x: int = 0) -> None:\n        return x ** 2  # comment\r\n\r\n
https://example.org/?a=1&b=%20  ÀÉÎÕÜ Привет мир, 你好世界 こんにちは مرحبا 🙂🚀   internationalization
"""


@dataclass(frozen=True)
class TokenizerContext(BuildContext[S]):
    """The context with which a tokenizer is built. It is sent to worker processes."""

    path: str | None
    """``model.tokenizer_path``."""


class TextTokenizer(ABC):
    """Converts text to token ids and back. Three members are required; the others have defaults."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Largest id plus one."""

    @abstractmethod
    def encode_document(self, text: str) -> list[int] | NDArray[Any]:
        """Return the ids of a whole document, including the tokens that mark its begin and end. Names of special tokens in
        the text are encoded as plain text."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, with special tokens shown by name."""

    def marks(self) -> tuple[Sequence[int], Sequence[int]] | None:
        """Return the ids that :meth:`encode_document` puts before and after a text; ``None`` if that is unclear.

        By default an empty document tells: none or two ids are its begin and its end.
        """
        ids = [int(token) for token in self.encode_document("")]
        return (ids[:1], ids[1:]) if len(ids) in (0, 2) else None

    @property
    def begin_ids(self) -> list[int]:
        """Ids before the text of a document; none if that is unclear."""
        begin, _ = self.marks() or ((), ())
        return [int(token) for token in begin]

    @property
    def end_ids(self) -> list[int]:
        """Ids after the text of a document; none if that is unclear."""
        _, end = self.marks() or ((), ())
        return [int(token) for token in end]

    def describe_special_tokens(self) -> list[str]:
        """Return lines for the log that say which tokens mark documents, and why; none by default."""
        return []

    def tokenizer_files(self) -> Mapping[str, str] | None:
        """Return the contents of ``tokenizer.json`` and ``tokenizer_config.json`` for ``transformers``, by file name, in
        which a text has the ids of :meth:`encode_document` without those that end a document. ``None``: there are only the
        files that the tokenizer was read from."""
        return None

    def fingerprint(self) -> str:
        """Return a digest of the vocabulary size and of the ids of a text with many kinds of characters. Tokenizers with
        equal fingerprints are interchangeable."""
        ids = [int(token) for token in self.encode_document(_PROBE)]
        return hashlib.sha256(repr((self.vocab_size, ids)).encode()).hexdigest()[:16]


Message: TypeAlias = "Mapping[str, Any]"
"""A message of a chat: ``role`` ("system", "user", "assistant", ...), ``content``, and what else the template reads."""


@dataclass(frozen=True)
class RenderedChat:
    """A chat as one text."""

    text: str
    """The chat, as the template renders it."""
    assistant: tuple[tuple[int, int], ...] | None = None
    """Ranges of characters that the assistant writes, ends exclusive; ``None`` if the template does not say."""


class ChatTokenizer(TextTokenizer):
    """A tokenizer that may have a chat template."""

    @abstractmethod
    def encode_with_special_tokens(self, text: str) -> list[int]:
        """Return the ids of ``text``, such as a rendered chat, in which names of special tokens stand for those tokens. Adds
        no other token."""

    @abstractmethod
    def require_chat_template(self) -> None:
        """
        Raises:
            UserError: there is no template, or a damaged one.
        """

    @abstractmethod
    def render_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Any] | None = None,
        date: datetime.date | None = None,
    ) -> RenderedChat:
        """Return the text of ``messages``, including the names of special tokens.

        Args:
            add_generation_prompt: whether to append what precedes the assistant's next message.
            tools: descriptions of functions that the assistant may call.
            date: the date for templates that write one; ``None``: today.

        Raises:
            UserError: there is no template, or it refuses the messages.
        """

    def render_prefixes(
        self,
        messages: Sequence[Message],
        prefixes: Sequence[tuple[int, bool]],
        tools: Sequence[Any] | None = None,
        date: datetime.date | None = None,
    ) -> tuple[RenderedChat, Iterable[str]]:
        """Return ``messages`` as :meth:`render_chat` does, and the texts of their prefixes, which are not needed, and not
        rendered, if the template says what the assistant writes. By default one call of :meth:`render_chat` for each. They
        may be rendered while they are read, because those of a long chat may not fit into memory together.

        Args:
            prefixes: number of messages of each prefix, and whether to append what precedes the assistant's next message.

        Raises:
            UserError: as :meth:`render_chat`.
        """
        chat = self.render_chat(messages, False, tools, date)
        asked = prefixes if chat.assistant is None else ()
        return chat, [self.render_chat(messages[:number], prompt, tools, date).text for number, prompt in asked]

    @property
    def turn_end_ids(self) -> Sequence[int]:
        """The special token that ends a message of the assistant; empty if there is none, or it is unknown."""
        return ()


@dataclass(frozen=True)
class TokenizerSpec:
    """A tokenizer that can be built in another process."""

    build: Ref[Callable[[TokenizerContext[Any]], TextTokenizer]]
    context: TokenizerContext[Any]

    def open(self) -> TextTokenizer:
        """Build the tokenizer.

        Raises:
            UserError: its file is missing or damaged.
        """
        return self.build.call(TextTokenizer, self.context)


def token_ids(tokens: Sequence[int] | NDArray[Any], vocab_size: int) -> NDArray[Any]:
    """Return a document's ids as an array of integers, each from 0 to ``vocab_size - 1``. An id beyond the embedding's rows
    would end a run without a hint at its origin, and break a GPU's context.

    Raises:
        ValueError: they are not integers, or one is out of range; names the first.
    """
    import numpy  # not at module level: commands that do not tokenise import this module too

    ids = numpy.asarray(tokens)
    if ids.size == 0:
        return numpy.empty(0, numpy.uint32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"is an array {list(ids.shape)} of {ids.dtype}, not a list of token ids")
    if ids.max() >= vocab_size or (ids.dtype.kind == "i" and ids.min() < 0):
        place = int(numpy.flatnonzero((ids >= vocab_size) | (ids < 0))[0])
        raise ValueError(f"token {place} has the id {ids[place]}, but the largest id of the vocabulary is {vocab_size - 1}")
    return ids


def without_surrogates(text: str) -> str:
    """Return ``text`` with surrogate pairs joined, and with lone surrogates (``"\\ud83d"`` in JSON), which no tokenizer can
    encode, replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
