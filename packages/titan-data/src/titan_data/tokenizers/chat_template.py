"""Chat templates: messages to the text that a model was tuned on."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_core.api import RenderedChat, UserError
from titan_core.api.data.tokenizer import Message
from titan_core.toolkit.files import read_text
from titan_core.toolkit.plain_json import json_kind, read_object
from titan_data.template_process import SandboxedTemplate, TemplateRefused, TemplateStopped

CONFIG = "tokenizer_config.json"
TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
_FETCH = "download it again"
_MOST_ANSWERS = 12
"""Answers that the prefixes of a chat may take, each with the limits of a rendering."""


class ChatTemplate:
    """A template as ``transformers`` writes it, beside a tokenizer's files."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], where: str, with_tools: ChatTemplate | None = None
    ) -> None:
        """
        Args:
            special_tokens: variables of the template: the roles of special tokens, and their texts.
            with_tools: the template for chats with tools, if it is another one.
        """
        self._where, self._with_tools = where, with_tools
        try:
            self._template = SandboxedTemplate("chat", source, where, special_tokens)
        except TemplateRefused as error:
            raise UserError.one(where, f"the chat template is not a Jinja template: {error}", "download it again") from None

    @classmethod
    def read(cls, folder: Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
        """Return the template in ``folder``. Those in files take precedence over those in ``tokenizer_config.json``.

        Raises:
            UserError: the folder has no template, or a damaged one.
        """
        files = {"default": folder / TEMPLATE} if (folder / TEMPLATE).exists() else {}
        files |= {file.stem: file for file in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
        found = {name: (_text(file, folder), str(file)) for name, file in files.items()} or _in_config(folder)
        if "default" not in found:
            why = f"has no chat template (neither {TEMPLATE} nor chat_template in {CONFIG})"
            fix = f"use the tokenizer of an instruction-tuned model (`titan tokenizer download`), or write {TEMPLATE}"
            raise UserError.one(str(folder), why, fix)
        source, where = found["default"]
        tools = cls(found["tool_use"][0], special_tokens, found["tool_use"][1]) if "tool_use" in found else None
        return cls(source, special_tokens, where, tools)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        date: datetime.date | None = None,
    ) -> RenderedChat:
        """See :meth:`titan_core.api.ChatTokenizer.render_chat`.

        Raises:
            UserError: the template refuses them.
        """
        return self.render_prefixes(messages, (), tools, date, add_generation_prompt)[0]

    def render_prefixes(
        self,
        messages: Sequence[Message],
        prefixes: Sequence[tuple[int, bool]],
        tools: Sequence[Any] | None = None,
        date: datetime.date | None = None,
        add_generation_prompt: bool = False,
    ) -> tuple[RenderedChat, Iterable[str]]:
        """See :meth:`titan_core.api.ChatTokenizer.render_prefixes`. One request renders those that its time suffices for.

        Raises:
            UserError: the template refuses them.
        """
        if tools and self._with_tools is not None:
            return self._with_tools.render_prefixes(messages, prefixes, tools, date, add_generation_prompt)
        now = datetime.datetime.combine(date, datetime.time()) if date is not None else datetime.datetime.now()
        values = {
            "messages": [_message(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": list(tools) if tools else None,
            "now": now.isoformat(),
            "prefixes": prefixes,
        }
        found = self._rendered(values)
        ranges = found["assistant"]
        if ranges is not None:
            return RenderedChat(found["text"], tuple((start, end) for start, end in ranges)), ()
        return RenderedChat(found["text"]), self._prefixes(values, found)

    def _prefixes(self, values: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
        """Return the prefixes one by one, because together they take the square of the memory of a chat."""
        text, asked = found["text"], values["prefixes"]
        for _ in range(_MOST_ANSWERS):
            for shared, rest in found["prefixes"]:
                yield text[:shared] + rest
            asked = asked[len(found["prefixes"]) :]
            if not asked:
                return
            found = self._rendered({**values, "prefixes": asked})
        number = len(values["messages"])
        why = f"the template is stopped: it takes too long to render the beginnings of a chat of {number} messages"
        fix = 'set chat.train_on = "last", or use a template that marks the assistant\'s part with {% generation %}'
        raise TemplateStopped.one(self._where, why, fix)

    def _rendered(self, values: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._template.render(values)
        except TemplateRefused as error:
            raise UserError.one(self._where, f"the chat template refuses the messages: {error}", "") from None


def _message(message: Message) -> dict[str, Any]:
    """Return ``message`` as ``transformers`` gives it to a template: without values that are null, and with the reasoning
    under each of its names that templates read."""
    found = {key: value for key, value in message.items() if value is not None}
    reasoning = next((found[key] for key in ("reasoning_content", "thinking", "reasoning") if key in found), None)
    return found if reasoning is None else {"thinking": reasoning, **found, "reasoning_content": reasoning}


def _in_config(folder: Path) -> dict[str, tuple[str, str]]:
    """Return the templates in ``tokenizer_config.json`` by name, and where they are."""
    file = folder / CONFIG
    found = read_object(file, _FETCH, inside=folder).get("chat_template") if file.exists() else None
    if isinstance(found, str):
        found = {"default": found}
    elif isinstance(found, list):
        found = {one.get("name"): one.get("template") for one in found if isinstance(one, Mapping)}
    found = {} if found is None else found
    if not isinstance(found, Mapping) or not all(isinstance(one, str) for both in found.items() for one in both):
        raise UserError.one(str(file), f"chat_template is {json_kind(found)}, not a template or several with names", _FETCH)
    return {name: (source, str(file)) for name, source in found.items()}


def _text(file: Path, folder: Path) -> str:
    try:
        return read_text(file, inside=folder)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError.one(str(file), f"cannot be read: {getattr(error, 'strerror', None) or error}", _FETCH) from None
