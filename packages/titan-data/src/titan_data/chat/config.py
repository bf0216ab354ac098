"""The config section of dataset ``chat``."""

from __future__ import annotations

from typing import ClassVar, Literal

from titan_core.api import Section


class ChatSection(Section):
    section: ClassVar[str] = "chat"

    train_on: Literal["all", "last"] = "all"
    """Messages of the assistant to train on: all of a chat, or the last one. All other tokens are context without a loss."""
    template: Literal["tokenizer", "none"] = "tokenizer"
    """Render records by the chat template beside the tokenizer, or not: the text is then the prompt followed by the
    completion, between the tokens that mark documents, and records of messages are refused."""
    too_long: Literal["drop", "truncate", "stop"] = "drop"
    """Action for a record that does not fit into a sequence: skip it, cut off its end, or stop. Skipped and cut records are
    counted and logged."""
