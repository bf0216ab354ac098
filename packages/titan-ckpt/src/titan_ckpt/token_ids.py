"""Which ids mark the begin and the end of a text, for those who use a model that was trained with a tokenizer. Free of
torch."""

from __future__ import annotations

from titan_core.api.tokenizer import TextTokenizer


def token_ids(tokenizer: TextTokenizer) -> dict[str, list[int]]:
    """``begin`` and ``end``: the marks that ``tokenizer`` puts around a document; empty where it puts none.

    A tokenizer says so by ``begin_ids`` and ``end_ids``. For one that does not, an empty document is encoded: two ids
    are its marks, and a single one would be either.
    """
    begin, end = getattr(tokenizer, "begin_ids", None), getattr(tokenizer, "end_ids", None)
    if begin is not None and end is not None:
        return {"begin": [int(one) for one in begin], "end": [int(one) for one in end]}
    marks = [int(one) for one in tokenizer.encode_document("")]
    return {"begin": marks[:1], "end": marks[1:]} if len(marks) == 2 else {"begin": [], "end": []}
