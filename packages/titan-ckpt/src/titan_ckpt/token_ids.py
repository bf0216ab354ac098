"""Ids that mark the begin and the end of a document, saved for users of the trained model. Does not import torch."""

from __future__ import annotations

from titan_core.api.tokenizer import RendersChats, TextTokenizer


def token_ids(tokenizer: TextTokenizer) -> dict[str, list[int]]:
    """Return the ids that ``tokenizer`` puts at the ``begin`` and ``end`` of a document, and at the end of the assistant's
    turn in a chat (``turn_end``).

    The first two are the attributes ``begin_ids`` and ``end_ids`` if the tokenizer has both. Otherwise an empty document is
    encoded: two ids are its begin and end; any other number of ids is ambiguous, and both lists are empty.
    """
    turn_end = [int(id_) for id_ in tokenizer.turn_end_ids] if isinstance(tokenizer, RendersChats) else []
    begin, end = getattr(tokenizer, "begin_ids", None), getattr(tokenizer, "end_ids", None)
    if begin is not None and end is not None:
        return {"begin": [int(id_) for id_ in begin], "end": [int(id_) for id_ in end], "turn_end": turn_end}
    marks = [int(id_) for id_ in tokenizer.encode_document("")]
    begin, end = (marks[:1], marks[1:]) if len(marks) == 2 else ([], [])
    return {"begin": begin, "end": end, "turn_end": turn_end}
