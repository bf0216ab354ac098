"""Formats generated text and streams it to the terminal while it grows."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from titan_core.api import TextTokenizer
from titan_core.toolkit.text import printable


class Continuation:
    """The text and tokens of one sequence, without the token or text that ended it."""

    def __init__(self, tokenizer: TextTokenizer, end_ids: Collection[int], stop: Sequence[str]) -> None:
        """
        Args:
            end_ids: tokens that end the sequence.
            stop: texts that end it.
        """
        self._stream, self._end_ids, self._stop = TextStream(tokenizer), frozenset(end_ids), tuple(stop)
        self._held = max((len(text) - 1 for text in stop), default=0)  # characters that may be the begin of a stop text
        self._shown = 0
        self.ended = False
        self.tokens: list[int] = []
        """Token ids, without one that ended the sequence."""
        self.text = ""
        """Their text, up to a stop text."""

    def add(self, token: int) -> bool:
        """Append ``token``; returns whether the sequence continues."""
        if token in self._end_ids:
            self.finish()
            return False
        self.tokens.append(token)
        self.text += self._stream.add(token)
        places = [place for text in self._stop if (place := self.text.find(text)) >= 0]
        if places:
            self.text, self.ended = self.text[: min(places)], True
        return not self.ended

    def finish(self) -> None:
        """No further token follows."""
        if not self.ended:
            self.text += self._stream.finish()
            self.ended = True

    def news(self) -> str:
        """The text that was not returned before and cannot become part of a stop text any more."""
        end = len(self.text) if self.ended else max(self._shown, len(self.text) - self._held)
        text, self._shown = self.text[self._shown : end], end
        return text


class Stream:
    """Prints continuations to standard output: one as it grows, several one after another when each has ended. Control
    characters that the model writes are escaped on a terminal."""

    def __init__(self, continuations: Sequence[Continuation]) -> None:
        self._continuations = continuations
        self._is_terminal = sys.stdout.isatty()
        self._column = 0

    def show(self) -> None:
        """Print what is new."""
        if len(self._continuations) == 1:
            self._write(self._continuations[0].news())
            sys.stdout.flush()

    def close(self) -> None:
        """Print the rest."""
        for number, continuation in enumerate(self._continuations, 1):
            continuation.finish()
            if len(self._continuations) > 1:
                self._write(f"--- {number} ---\n")
            self._write(f"{continuation.news()}\n")
        sys.stdout.flush()

    def _write(self, text: str) -> None:
        if self._is_terminal:
            # Tabs depend on what the row already contains.
            text = printable(" " * self._column + text)[self._column :]
            self._column = len(text.rpartition("\n")[2]) + (0 if "\n" in text else self._column)
        sys.stdout.write(text)


_UNDECODED = "\ufffd"


class TextStream:
    """The text of a growing sequence. A character whose bytes are spread over several tokens appears with the last one."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._decoded = 0  # ids whose text is complete; decoding starts there, so that a long text is not decoded again
        self._context = 0  # ids before them that decoding needs: some tokenizers write no space at the start of a text

    def add(self, token: int) -> str:
        """Append ``token``; returns the text that is complete now and was not before."""
        self._ids.append(token)
        known = self._tokenizer.decode(self._ids[self._context : self._decoded])
        text = self._tokenizer.decode(self._ids[self._context :])
        if text.endswith(_UNDECODED) and len(self._ids) - self._decoded < 4:  # UTF-8 has at most four bytes
            return ""
        self._context, self._decoded = self._decoded, len(self._ids)
        return text[len(known) :]

    def finish(self) -> str:
        """The text of what is left; incomplete characters are shown as U+FFFD."""
        known = self._tokenizer.decode(self._ids[self._context : self._decoded])
        text = self._tokenizer.decode(self._ids[self._context :])
        self._context = self._decoded = len(self._ids)
        return text[len(known) :]
