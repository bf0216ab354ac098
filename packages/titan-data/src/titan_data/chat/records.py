"""Records of chats, in the forms that are in use: as a list of messages, and which of these to train on.

* ``messages``: ``[{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]``, optionally with ``tools``.
* ``conversations``: ShareGPT's ``[{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]``.
* ``prompt`` and ``completion``: two texts, or two lists of messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from titan_core.api import CorruptRecord
from titan_core.toolkit.plain_json import json_kind
from titan_core.toolkit.tokenizers import Message

ASSISTANT: Final = "assistant"
_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": ASSISTANT, "assistant": ASSISTANT, "system": "system"}
FIELDS: Final = "messages, conversations, or prompt and completion"


@dataclass(frozen=True)
class Chat:
    """A chat, up to its last message that is trained on."""

    messages: Sequence[Message]
    trained: tuple[int, ...]
    """Indices of the messages to train on, in order."""
    tools: Sequence[Any] | None = None
    texts: tuple[str, str] | None = None
    """Prompt and completion, if the record has them as texts."""


def chat_of(record: Any, last_only: bool, place: str) -> Chat:
    """Return the chat in ``record``.

    Args:
        last_only: whether to train on the last message of the assistant only.
        place: where the record comes from, for errors.

    Raises:
        CorruptRecord: the record contains no chat, or nothing to train on.
    """
    if not isinstance(record, Mapping):
        raise CorruptRecord(place, f"a record must be a JSON object, not {json_kind(record)}")
    present = {key: value for key, value in record.items() if value is not None}
    texts, first = None, 0
    if "messages" in present:
        messages = _messages(present["messages"], "messages", place)
    elif "conversations" in present:
        messages = _sharegpt(present["conversations"], place)
    elif "prompt" in present and "completion" in present:
        prompt, completion = present["prompt"], present["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            texts = (prompt, completion)
            messages = [{"role": "user", "content": prompt}, {"role": ASSISTANT, "content": completion}]
        else:
            before = _messages(prompt, "prompt", place)
            messages, first = [*before, *_messages(completion, "completion", place)], len(before)
    else:
        why = f"has neither of the fields {FIELDS} (fields: {', '.join(map(str, record))})"
        raise CorruptRecord(place, why, "rename its fields, or set data.format to a template or a plugin's format that does")
    trained = [
        index
        for index, message in enumerate(messages)
        if index >= first and message["role"] == ASSISTANT and message.get("weight", 1) != 0
    ]
    if not trained:
        raise CorruptRecord(place, "has no message of the assistant to train on", "remove it")
    messages = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
    trained = trained[-1:] if last_only else trained
    return Chat(messages[: trained[-1] + 1], tuple(trained), present.get("tools"), texts)


def _messages(value: Any, field: str, place: str) -> list[dict[str, Any]]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise CorruptRecord(place, f"field {field!r} contains {_kind(value)}, not a list of messages")
    messages = []
    for number, message in enumerate(value, 1):
        where = f"message {number} of field {field!r}"
        if not isinstance(message, Mapping):
            raise CorruptRecord(place, f"{where} is {_kind(message)}, not an object with role and content")
        # Tables fill the keys that other rows have with null.
        message = {key: item for key, item in message.items() if item is not None}
        if not isinstance(message.get("role"), str):
            raise CorruptRecord(place, f"{where} has no role (keys: {', '.join(map(str, message))})")
        if not isinstance(message.get("content", ""), str):
            raise CorruptRecord(place, f"the content of {where} is {_kind(message['content'])}, not text")
        if message.get("weight", 1) not in (0, 1):
            raise CorruptRecord(place, f"the weight of {where} is {message['weight']!r}, not 0 or 1")
        if "content" not in message and len(message) == 1:
            raise CorruptRecord(place, f"{where} has no content")
        messages.append(message)
    return messages


def _sharegpt(value: Any, place: str) -> list[dict[str, Any]]:
    if isinstance(value, Sequence) and all(isinstance(one, Mapping) and "role" in one for one in value):
        return _messages(value, "conversations", place)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise CorruptRecord(place, f"field 'conversations' contains {_kind(value)}, not a list of messages")
    messages = []
    for number, message in enumerate(value, 1):
        sender = message.get("from") if isinstance(message, Mapping) else None
        if sender not in _SHAREGPT_ROLES:
            why = f"message {number} of field 'conversations' is from {sender!r}, not from {', '.join(_SHAREGPT_ROLES)}"
            raise CorruptRecord(place, why)
        messages.append({"role": _SHAREGPT_ROLES[sender], "content": message.get("value")})
    return _messages(messages, "conversations", place)


def _kind(value: Any) -> str:
    return "an empty list" if value == [] else json_kind(value)
