"""Chat templates: messages to the text that a model was tuned on."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_core.api import RenderedChat, UserError
from titan_core.toolkit.files import read_text
from titan_core.toolkit.plain_json import json_kind, read_object
from titan_core.toolkit.tokenizers import Message
from titan_data.template_process import SandboxedTemplate, TemplateRefused

CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"


class ChatTemplate:
    """A template as ``transformers`` writes it, beside a tokenizer's files."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], where: str) -> None:
        self._where = where
        try:
            self._template = SandboxedTemplate("chat", source, where, special_tokens)
        except TemplateRefused as error:
            raise UserError.one(where, f"the chat template is not a Jinja template: {error}", "download it again") from None

    @classmethod
    def read(cls, folder: Path) -> ChatTemplate:
        """Return the template in ``folder``.

        Raises:
            UserError: the folder has no template, or a damaged one.
        """
        file = folder / CONFIG
        config = read_object(file, "download it again") if file.exists() else {}
        source = config.get("chat_template")
        if isinstance(source, list):  # several by name
            named = [one for one in source if isinstance(one, Mapping)]
            source = next((one.get("template") for one in named if one.get("name") == "default"), None)
        if (folder / TEMPLATE).exists():
            file = folder / TEMPLATE
            try:
                source = read_text(file)
            except (OSError, UnicodeDecodeError) as error:
                why = f"cannot be read: {getattr(error, 'strerror', None) or error}"
                raise UserError.one(str(file), why, "download it again") from None
        if not isinstance(source, str):
            why = f"has no chat template (neither {TEMPLATE} nor chat_template in {CONFIG})"
            fix = f"use the tokenizer of an instruction-tuned model (`titan tokenizer download`), or write {TEMPLATE}"
            raise UserError.one(str(folder), why, fix)
        special = {
            name: _content(name, value, file)
            for name, value in config.items()
            if name.endswith("_token") and not isinstance(value, bool | None)
        }
        return cls(source, special, str(file))

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
        now = datetime.datetime.combine(date, datetime.time()) if date is not None else datetime.datetime.now()
        values = {
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
            "tools": list(tools) if tools else None,
            "now": now.isoformat(),
        }
        try:
            found = self._template.render(values)
        except TemplateRefused as error:
            raise UserError.one(self._where, f"the chat template refuses the messages: {error}", "") from None
        ranges = found["assistant"]
        return RenderedChat(found["text"], None if ranges is None else tuple((start, end) for start, end in ranges))


def _content(name: str, value: Any, file: Path) -> str:
    text = value.get("content") if isinstance(value, Mapping) else value
    if not isinstance(text, str):
        raise UserError.one(str(file), f"{name} contains {json_kind(text)}, not the text of a token", "download it again")
    return text
