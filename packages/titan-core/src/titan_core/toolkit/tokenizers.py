"""Token ids of documents, and what identifies a tokenizer."""

from __future__ import annotations

from titan_core.api.data.tokenizer import (
    Message as Message,
    begin_and_end_ids as begin_and_end_ids,
    fingerprint as fingerprint,
    token_ids as token_ids,
    without_surrogates as without_surrogates,
)
