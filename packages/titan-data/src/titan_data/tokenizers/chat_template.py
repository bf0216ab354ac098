"""Chat templates: messages to the text that a model was tuned on."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from titan_core.api import RenderedChat, UserError
from titan_core.toolkit.files import read_text
from titan_core.toolkit.plain_json import json_kind, read_object
from titan_core.toolkit.tokenizers import Message
from titan_data.bounded_templates import BoundedEnvironment

CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"

_START, _END = "\ue000\ue001", "\ue001\ue000"
"""Mark what the assistant wrote in a rendered text, and are removed from it: characters of Unicode's private area."""


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}``, by which a template says what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares an attribute of the instance

    def parse(self, parser: Parser) -> nodes.Node:
        """Put marks around the text of the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_marked", [])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{_START}{caller()}{_END}"


class ChatTemplate:
    """A template as ``transformers`` writes it, beside a tokenizer's files. It runs in a bounded sandbox: a downloaded
    template must neither run code nor stop a job."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], where: str) -> None:
        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.add_filter("tojson", _json)
        environment.globals["raise_exception"] = _refuse
        self._special_tokens, self._where = dict(special_tokens), where
        self._marks = "endgeneration" in source
        try:
            self._template = environment.read(source)
        except TemplateError as error:
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
        texts = [value for message in messages for value in message.values() if isinstance(value, str)]
        if self._marks and any(_START in text or _END in text for text in texts):
            why = f"a message contains {_START!a} or {_END!a}, which mark the assistant's part of a chat here"
            raise UserError.one(self._where, why, "remove them")
        now = datetime.datetime.combine(date, datetime.time()) if date is not None else datetime.datetime.now()
        try:
            values: dict[str, Any] = {
                "messages": list(messages),
                "add_generation_prompt": add_generation_prompt,
                "tools": list(tools) if tools else None,
                "strftime_now": now.strftime,
                **self._special_tokens,
            }
            marked = BoundedEnvironment.text(self._template, values)
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            why = f"the chat template refuses the messages: {str(error) or type(error).__name__}"
            raise UserError.one(self._where, why, "") from None
        return _unmarked(marked) if self._marks else RenderedChat(marked)


def _unmarked(marked: str) -> RenderedChat:
    """Remove the marks of :class:`_Generation`, and return what was between them as ranges."""
    first, *rest = marked.split(_START)
    text, ranges = first, []
    for piece in rest:
        inner, _, after = piece.partition(_END)
        ranges.append((len(text), len(text) + len(inner)))
        text += inner + after
    return RenderedChat(text, tuple(ranges))


def _content(name: str, value: Any, file: Path) -> str:
    text = value.get("content") if isinstance(value, Mapping) else value
    if not isinstance(text, str):
        raise UserError.one(str(file), f"{name} contains {json_kind(text)}, not the text of a token", "download it again")
    return text


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise TemplateError(message)
