"""Dataset ``chat`` without a job: its context, and what of a document is trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy

from titan_core.api import DatasetContext, Ref, TokenizerContext, WeightedTokens
from titan_core.api.data.tokenizer import TokenizerSpec
from titan_data.chat.config import ChatSection

QUESTION, ANSWERED = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def chat_context(folder: Path, path: str | None = None, seq_len: int = 200, **section: Any) -> DatasetContext[ChatSection]:
    """Return the context of a job with the tokenizer in ``folder``; ``byte`` is the embedded one."""
    if folder.name == "byte":
        spec = TokenizerSpec(Ref[Any]("titan_core.data.byte_tokenizer:build"), TokenizerContext(section=None, path=None))
    else:
        spec = TokenizerSpec(
            Ref[Any]("titan_data.tokenizers.hugging_face:build"), TokenizerContext(section=None, path=str(folder))
        )
    return DatasetContext(
        section=ChatSection(**section),
        name="chat",
        path=path,
        text_field="text",
        seed=0,
        where="training.dataset_path",
        tokenizer_spec=spec,
        seq_len=seq_len,
    )


def trained(document: WeightedTokens) -> list[int]:
    """Return the ids of a document that have a loss."""
    assert set(numpy.unique(document.weights)) <= {0.0, 1.0} and document.whole
    return [int(token) for token, weight in zip(document.ids, document.weights, strict=True) if weight]
