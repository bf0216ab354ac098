"""Ids that mark the begin and the end of a document, saved for users of the trained model. Does not import torch."""

from __future__ import annotations

from titan_core.api import RendersChats, TextTokenizer
from titan_core.toolkit.tokenizers import begin_and_end_ids


def token_ids(tokenizer: TextTokenizer) -> dict[str, list[int]]:
    """Return the ids that ``tokenizer`` puts at the ``begin`` and ``end`` of a document, both empty if that is unclear, and
    at the end of the assistant's turn in a chat (``turn_end``)."""
    turn_end = [int(token) for token in tokenizer.turn_end_ids] if isinstance(tokenizer, RendersChats) else []
    begin, end = begin_and_end_ids(tokenizer) or ([], [])
    return {"begin": begin, "end": end, "turn_end": turn_end}
