"""Chats in records of any of the forms in use (:mod:`titan_data.chat.forms`): as a list of messages, and which of these to
train on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from titan_core.api import CorruptRecord
from titan_core.api.data.tokenizer import Message
from titan_core.toolkit.plain_json import json_kind, parse_json
from titan_data.chat.config import ChatSection
from titan_data.chat.forms import TOOLS, ChatForm, form_of_record

ASSISTANT: Final = "assistant"
CALLS: Final = "tool_calls"
_ROLES: Final = ("role", "from")
_CONTENTS: Final = ("content", "value")
_SENDERS: Final = {"human": "user", "user": "user", "gpt": ASSISTANT, "assistant": ASSISTANT, "system": "system"}
"""Roles of ShareGPT's messages, by sender."""
_TOOLS: Final = ("function_call", "function_response", "observation", "tool", "tool_call", "tool_response")


@dataclass(frozen=True)
class Chat:
    """A chat, up to its last message that is trained on."""

    messages: Sequence[Message]
    trained: tuple[int, ...]
    """Indices of the messages to train on, in order."""
    tools: Sequence[Any] | None = None
    texts: tuple[str, str] | None = None
    """Prompt and completion, if the record has them as texts, and no other message."""


def chat_of(record: Any, section: ChatSection, place: str) -> Chat:
    """Return the chat in ``record``.

    Args:
        section: which fields it is in, and which messages to train on.
        place: where the record comes from, for errors.

    Raises:
        CorruptRecord: the record contains no chat, one that cannot be represented, or nothing to train on.
    """
    present = fields_of(record, place)
    form = form_of_record(present, section, place)
    texts, first = None, 0
    if form.messages:
        messages = _messages(present[form.messages], form.messages, section, place)
    else:
        messages, first, texts = _pair(present, form, section, place)
    if form.system and present.get(form.system) and messages[0]["role"] != "system":
        system = {"role": "system", "content": _text(present[form.system], f"field {form.system!r}", place)}
        messages, first, texts = [system, *messages], first + 1, None
    trained = [
        index
        for index, message in enumerate(messages)
        if index >= first and message["role"] == ASSISTANT and message.get("weight", 1) != 0
    ]
    if not trained:
        raise CorruptRecord(place, "has no message of the assistant to train on", "remove it")
    messages = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
    trained = trained[-1:] if section.train_on == "last" else trained
    tools = _objects(present.get(TOOLS), f"field {TOOLS!r}", "tool", place)
    return Chat(messages[: trained[-1] + 1], tuple(trained), tools, texts)


def fields_of(record: Any, place: str) -> dict[str, Any]:
    """Return the fields of ``record`` that are not null. Tables fill the fields that other rows have with null.

    Raises:
        CorruptRecord: it has no fields.
    """
    if not isinstance(record, Mapping):
        raise CorruptRecord(place, f"a record must be a JSON object, not {json_kind(record)}")
    return {key: value for key, value in record.items() if value is not None}


def _pair(
    record: Mapping[str, Any], form: ChatForm, section: ChatSection, place: str
) -> tuple[list[dict[str, Any]], int, tuple[str, str] | None]:
    """Return the messages of a pair, the number of those in the prompt, and its texts."""
    prompt, completion = record[form.prompt], record[form.completion]
    context = record.get(form.context, "") if form.context else ""
    if isinstance(prompt, str) and isinstance(completion, str):
        more = _text(context, f"field {form.context!r}", place)
        prompt = f"{prompt}\n\n{more}" if more else prompt
        messages = [{"role": "user", "content": prompt}, {"role": ASSISTANT, "content": completion}]
        return messages, 1, (prompt, completion)
    before = _messages(prompt, form.prompt, section, place)
    if context:
        raise CorruptRecord(place, f"field {form.context!r} cannot follow a prompt that is a list of messages")
    return [*before, *_messages(completion, form.completion, section, place)], len(before), None


def _messages(value: Any, field: str, section: ChatSection, place: str) -> list[dict[str, Any]]:
    what = f"field {field!r}"
    found = _objects(value, what, "message", place)
    if not found:
        raise CorruptRecord(place, f"{what} contains {_kind(found)}, not a list of messages")
    messages = []
    for number, message in enumerate(found, 1):
        present = {key: item for key, item in message.items() if item is not None}
        messages.append(_message(present, f"message {number} of {what}", section, place))
    return messages


def _message(message: dict[str, Any], where: str, section: ChatSection, place: str) -> dict[str, Any]:
    """Return ``message`` with the keys role and content."""
    role = section.role or next((key for key in _ROLES if key in message), "")
    if not isinstance(message.get(role), str):
        raise CorruptRecord(place, f"{where} has no role (keys: {', '.join(map(str, message))})", "set chat.role to its key")
    content = section.content or next((key for key in _CONTENTS if key in message), "")
    names = {role: "role", content: "content"}
    rest = message.keys() - names.keys()
    if message[role] in _SENDERS:
        named = _SENDERS[message[role]]
    elif role == "role":  # templates know others, such as "tool"
        named = message[role]
    elif message[role] in _TOOLS:
        why = f"{where} is from {message[role]!r}: calls of tools cannot be represented in this form"
        raise CorruptRecord(place, why, "write messages with role and tool_calls, or remove the record")
    else:
        raise CorruptRecord(place, f"{where} is from {message[role]!r}, not from {', '.join(_SENDERS)}")
    found = {names.get(key, key): value for key, value in message.items()}
    found["role"] = named
    if content in message:
        found["content"] = _text(message[content], f"the content of {where}", place)
    elif not rest:
        raise CorruptRecord(place, f"{where} has no content", "set chat.content to its key")
    if CALLS in found:
        found[CALLS] = _objects(found[CALLS], f"{CALLS} of {where}", "call", place) or []
    if message.get("weight", 1) not in (0, 1):
        raise CorruptRecord(place, f"the weight of {where} is {message['weight']!r}, not 0 or 1")
    return found


def _text(value: Any, what: str, place: str) -> str:
    """Return a text, or the parts of one.

    Raises:
        CorruptRecord: it is not text, or has parts of another kind.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence):
        raise CorruptRecord(place, f"{what} is {_kind(value)}, not text")
    texts = []
    for number, part in enumerate(value, 1):
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or (kind == "text" and not isinstance(part.get("text"), str)):
            raise CorruptRecord(place, f"part {number} of {what} is {_kind(part)} without a text")
        if kind != "text":
            why = f"part {number} of {what} is of type {kind!r}, and only text can be trained on"
            raise CorruptRecord(place, why, "remove the record, or the part")
        texts.append(part["text"])
    return "".join(texts)


def _objects(value: Any, what: str, of: str, place: str) -> list[Any] | None:
    """Return the objects in a list, which some write as a text of JSON, or each object as one."""
    value = _parsed(value, what, f"a list of {of}s", place)
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise CorruptRecord(place, f"{what} contains {_kind(value)}, not a list of {of}s")
    objects = [_parsed(item, f"{of} {number} of {what}", "an object", place) for number, item in enumerate(value, 1)]
    for number, item in enumerate(objects, 1):
        if not isinstance(item, Mapping):
            raise CorruptRecord(place, f"{of} {number} of {what} is {_kind(item)}, not an object")
    return objects


def _parsed(value: Any, what: str, expected: str, place: str) -> Any:
    """Return ``value``, or what it represents if it is a text of JSON.

    Raises:
        CorruptRecord: it is another text.
    """
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value) if value.strip() else None
    except ValueError as error:
        raise CorruptRecord(place, f"{what} is a text, not {expected}, and not JSON: {error}") from None


def _kind(value: Any) -> str:
    return "an empty list" if value == [] else json_kind(value)
