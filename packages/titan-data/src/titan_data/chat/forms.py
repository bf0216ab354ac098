"""Finds the fields of a record that hold a chat: as the recipe says, or detected from their names.

The names are those in common use: ``messages`` (OpenAI, ``transformers``), ``conversations`` (ShareGPT), ``instruction``,
``input`` and ``output`` (Alpaca), ``instruction``, ``context`` and ``response`` (Dolly), and pairs of a prompt or question
and a completion, response or answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from titan_core.api import CorruptRecord
from titan_data.chat.config import ChatSection

FIELDS: Final = "messages, conversations, prompt and completion, question and answer, or instruction and output"
_MESSAGES: Final = ("messages", "conversations", "conversation")
_PAIRS: Final = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("query", "answer"),
    ("input", "output"),
)
_CONTEXTS: Final = {"instruction": ("input", "context")}
"""Fields that continue a prompt, by the field of the prompt."""
_SYSTEM: Final = ("system", "system_prompt")
TOOLS, _EARLIER = "tools", "history"


@dataclass(frozen=True)
class ChatForm:
    """The fields of a record that are read; an empty name: none."""

    messages: str = ""
    prompt: str = ""
    completion: str = ""
    context: str = ""
    system: str = ""

    def describe(self, fields: Iterable[str]) -> list[str]:
        """Return lines that say what is read, and which of ``fields`` is not."""
        if self.messages:
            line = f"each record is a list of messages, in field {self.messages!r}"
        else:
            context = f", followed by {self.context!r}," if self.context else ""
            pair = f"field {self.prompt!r}{context} is the prompt, and {self.completion!r} the completion"
            line = f"each record is a pair: {pair}"
        if self.system:
            line += f"; {self.system!r} is the system message"
        used = {self.messages, self.prompt, self.completion, self.context, self.system, TOOLS}
        unread = [field for field in fields if field not in used]
        return [line, *([f"fields that are not read: {', '.join(unread)}"] if unread else [])]


def known_fields(section: ChatSection) -> tuple[str, ...]:
    """Return the names of all fields that a record may be read from."""
    named = (section.messages, section.prompt, section.completion, section.context, section.system)
    contexts = (name for names in _CONTEXTS.values() for name in names)
    pairs = (name for pair in _PAIRS for name in pair)
    return tuple(dict.fromkeys(name for name in (*named, *_MESSAGES, *pairs, *contexts, *_SYSTEM, TOOLS, _EARLIER) if name))


def form_of_record(record: Mapping[str, Any], section: ChatSection, place: str) -> ChatForm:
    """Return the fields of ``record`` to read.

    Args:
        record: its fields that are not null.
        section: the fields that the recipe names.
        place: where the record comes from, for errors.

    Raises:
        CorruptRecord: it has no such fields, or several that may be meant.
    """
    system = section.system or next((name for name in _SYSTEM if name in record), "")
    messages = section.messages or next((name for name in _MESSAGES if name in record and not section.prompt), "")
    if messages:
        if messages not in record:
            raise CorruptRecord(place, f"no field {messages!r} (fields: {', '.join(map(str, record))})", "set chat.messages")
        return ChatForm(messages=messages, system=system)
    if record.get(_EARLIER):
        why = f"field {_EARLIER!r} has earlier turns, which cannot be represented beside a pair"
        raise CorruptRecord(place, why, "write the chat as a list of messages")
    prompt, completion = (section.prompt, section.completion) if section.prompt else _pair(record, place)
    for name, key in ((prompt, "chat.prompt"), (completion, "chat.completion")):
        if name not in record:
            raise CorruptRecord(place, f"no field {name!r} (fields: {', '.join(map(str, record))})", f"set {key}")
    known = _CONTEXTS.get(prompt, ())
    context = section.context or next((name for name in known if name in record and name != completion), "")
    return ChatForm(prompt=prompt, completion=completion, context=context, system=system)


def _pair(record: Mapping[str, Any], place: str) -> tuple[str, str]:
    found = [pair for pair in _PAIRS if pair[0] in record and pair[1] in record]
    if len(found) > 1:  # Alpaca's input belongs to its instruction
        found = [pair for pair in found if pair != ("input", "output")]
    names = ", ".join(map(str, record))
    if not found:
        fix = "name its fields in [chat] (chat.prompt and chat.completion, or chat.messages), or set data.format"
        raise CorruptRecord(place, f"has neither of the fields {FIELDS} (fields: {names})", fix)
    if len(found) > 1:
        several = ", or ".join(f"{prompt!r} and {completion!r}" for prompt, completion in found)
        why = f"the prompt and the completion may be {several} (fields: {names})"
        raise CorruptRecord(place, why, "set chat.prompt and chat.completion")
    return found[0]
