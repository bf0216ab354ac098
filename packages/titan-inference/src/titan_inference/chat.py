"""Chat templates: messages to the text that a model was tuned on."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from titan_core.api.errors import UserError
from titan_core.api.tools.plain_json import read_object

CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"


class ChatTemplate:
    """A template as ``transformers`` writes it, beside a tokenizer's files. It runs in jinja2's sandbox: a downloaded
    template must not run code."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], where: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self._special_tokens, self._where = dict(special_tokens), where
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise UserError.one(where, f"the chat template is not a Jinja template: {error}", "download it again") from None

    @classmethod
    def read(cls, folder: Path) -> ChatTemplate:
        """The template in ``folder``.

        Raises:
            UserError: it has none, or a damaged one.
        """
        file = folder / CONFIG
        config = read_object(file, "download it again") if file.exists() else {}
        source = config.get("chat_template")
        if isinstance(source, list):  # several by name
            source = next((one["template"] for one in source if one.get("name") == "default"), None)
        if (folder / TEMPLATE).exists():
            source, file = (folder / TEMPLATE).read_text(encoding="utf-8"), folder / TEMPLATE
        if not isinstance(source, str):
            why = f"has no chat template (neither {TEMPLATE} nor chat_template in {CONFIG})"
            fix = "use the tokenizer of an instruction-tuned model (`titan tokenizer download OWNER/NAME`), or drop --chat"
            raise UserError.one(str(folder), why, fix)
        special = {name: _content(value) for name, value in config.items() if name.endswith("_token") and value}
        return cls(source, special, str(file))

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text of ``messages`` (``role`` and ``content`` each).

        Raises:
            UserError: the template refuses them.
        """
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        except TemplateError as error:
            raise UserError.one(self._where, f"the chat template refuses the messages: {error}") from None


def _content(value: Any) -> str:
    return str(value["content"]) if isinstance(value, Mapping) else str(value)


def _refuse(message: str) -> None:
    raise TemplateError(message)
