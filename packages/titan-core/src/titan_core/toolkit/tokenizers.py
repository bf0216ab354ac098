"""Messages of chats, and the ids and texts of documents."""

from __future__ import annotations

from titan_core.api.data.dataset import encode_text as encode_text
from titan_core.api.data.tokenizer import (
    Message as Message,
    token_ids as token_ids,
    without_surrogates as without_surrogates,
)
