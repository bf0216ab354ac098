"""Prompts as token ids. Free of torch."""

from __future__ import annotations

from titan_core.api import TextTokenizer


def encode_prompt(tokenizer: TextTokenizer, text: str) -> list[int]:
    """Return the ids of ``text`` from the begin of a document, without its end, where the model continues."""
    ids = [int(token) for token in tokenizer.encode_document(text)]
    end = tokenizer.end_ids
    return ids[: len(ids) - len(end)] if end and ids[-len(end) :] == end else ids
