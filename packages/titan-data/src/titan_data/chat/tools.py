"""Refuses chats with tools that the chat template would leave out without a word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from titan_core.api import ChatTokenizer, CorruptRecord, UserError
from titan_core.api.data.tokenizer import Message
from titan_data.chat.records import CALLS, Chat
from titan_data.chat.tokens import DATE
from titan_data.template_process import TemplateStopped

_FIX = "use a tokenizer whose chat template renders tools, or remove the record"


def require_rendered_tools(chat: Chat, tokenizer: ChatTokenizer, place: str) -> None:
    """Check that the text of ``chat`` depends on its tools, on each message that calls some, and on each answer of a tool.

    Args:
        place: where the chat comes from, for errors.

    Raises:
        CorruptRecord: the template leaves one of them out.
    """
    calls = [number for number, message in enumerate(chat.messages) if message.get(CALLS)]
    answers = [number for number, message in enumerate(chat.messages) if message["role"] == "tool"]
    if not (calls or answers or chat.tools):
        return
    whole = _rendered(chat.messages, chat.tools, tokenizer)
    if whole is None:
        return  # the template refuses the chat, and rendering it says why
    if chat.tools and _rendered(chat.messages, None, tokenizer) == whole:
        raise CorruptRecord(place, "has tools, which the chat template does not render", _FIX)
    for number in calls:
        without = {key: value for key, value in chat.messages[number].items() if key != CALLS}
        if _rendered([*chat.messages[:number], without, *chat.messages[number + 1 :]], chat.tools, tokenizer) == whole:
            why = f"message {number + 1} calls tools, and the chat template does not render {CALLS}"
            raise CorruptRecord(place, why, _FIX)
    for number in answers:
        if _rendered([*chat.messages[:number], *chat.messages[number + 1 :]], chat.tools, tokenizer) == whole:
            why = f"message {number + 1} is the answer of a tool, which the chat template does not render"
            raise CorruptRecord(place, why, _FIX)


def _rendered(messages: Sequence[Message], tools: Sequence[Any] | None, tokenizer: ChatTokenizer) -> str | None:
    try:
        return tokenizer.render_chat(messages, False, tools, DATE).text
    except TemplateStopped:
        raise
    except UserError:
        return None
