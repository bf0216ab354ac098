"""Ids that mark the begin and the end of a document, saved for users of the trained model. Does not import torch."""

from __future__ import annotations

from titan_core.api.tokenizer import TextTokenizer


def token_ids(tokenizer: TextTokenizer) -> dict[str, list[int]]:
    """Return the ids that ``tokenizer`` puts at the ``begin`` and ``end`` of a document.

    They are the attributes ``begin_ids`` and ``end_ids`` if the tokenizer has both. Otherwise an empty document is encoded:
    two ids are its begin and end; any other number of ids is ambiguous, and both lists are empty.
    """
    begin, end = getattr(tokenizer, "begin_ids", None), getattr(tokenizer, "end_ids", None)
    if begin is not None and end is not None:
        return {"begin": [int(id_) for id_ in begin], "end": [int(id_) for id_ in end]}
    marks = [int(id_) for id_ in tokenizer.encode_document("")]
    return {"begin": marks[:1], "end": marks[1:]} if len(marks) == 2 else {"begin": [], "end": []}
