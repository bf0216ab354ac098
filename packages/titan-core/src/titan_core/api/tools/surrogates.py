"""Halves of surrogate pairs, as ``"\\ud83d"`` in JSON makes them: no tokenizer can encode them."""

from __future__ import annotations


def without_surrogates(text: str) -> str:
    """``text`` with pairs joined and halves replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
