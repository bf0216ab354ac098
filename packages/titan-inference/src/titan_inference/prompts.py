"""Prompts as token ids. Free of torch."""

from __future__ import annotations

from titan_core.api import TextTokenizer
from titan_core.toolkit.tokenizers import begin_and_end_ids


def encode_prompt(tokenizer: TextTokenizer, text: str) -> list[int]:
    """Return the ids of ``text`` from the begin of a document, without its end, where the model continues."""
    ids = [int(token) for token in tokenizer.encode_document(text)]
    _, end = begin_and_end_ids(tokenizer) or ([], [])
    return ids[: len(ids) - len(end)] if end and ids[-len(end) :] == end else ids


def end_ids_of(tokenizer: TextTokenizer) -> set[int]:
    """Return the ids that end a text."""
    _, end = begin_and_end_ids(tokenizer) or ([], [])
    return set(end)
