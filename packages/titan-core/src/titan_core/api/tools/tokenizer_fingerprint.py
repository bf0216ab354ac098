"""Telling tokenizers apart: two that give the same ids to the same text may stand for each other."""

from __future__ import annotations

import hashlib

from titan_core.api.tokenizer import TextTokenizer

_PROBE = """The quick brown fox can't jump over 1234567890 lazy dogs; naïve café, Übergröße — don't!
\tdef f(x: int = 0) -> None:\n        return x ** 2  # comment\r\n\r\n
https://example.org/?a=1&b=%20  ÀÉÎÕÜ Привет мир, 你好世界 こんにちは مرحبا 🙂🚀   internationalization
"""


def fingerprint(tokenizer: TextTokenizer) -> str:
    """Of its vocabulary's size and the ids that it gives to a text of many kinds of characters."""
    ids = [int(token) for token in tokenizer.encode_document(_PROBE)]
    return hashlib.sha256(repr((tokenizer.vocab_size, ids)).encode()).hexdigest()[:16]
