"""Token ids to text while they arrive."""

from __future__ import annotations

from titan_core.api import TextTokenizer

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
