"""The value of ``data.format``: a template of a record's fields, or the name of a format that a plugin registers."""

from __future__ import annotations

import re

from titan_core.api import Config, RecordFormat, Registry, UserError
from titan_core.api.data.dataset import FormatSpec

_CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""``module:function``, which older versions of Titan imported and called."""
_TEMPLATE = 'a template of fields looks like "{{ question }} {{ answer }}"'


def format_of(config: Config, registry: Registry, key: str, text: str | None) -> FormatSpec | None:
    """Return what the value ``text`` of ``key`` stands for; ``None`` for no format. Whether a template is valid is for the
    dataset to check.

    Raises:
        UserError: ``text`` is neither a template nor the name of a registered format.
    """
    if text is None:
        return None
    if any(mark in text for mark in ("{{", "{%")):
        return FormatSpec(text, key)
    if text not in registry.names(RecordFormat) and _CODE.fullmatch(text):
        why = "names code, and a recipe runs none but that of plugins"
        fix = "register the function as a format in a file, and start `titan --plugin FILE ...` (docs/data.md); or "
        raise UserError.one(config.where(key, text), why, fix + _TEMPLATE)
    try:
        return FormatSpec(text, key, registry.get(RecordFormat, text).convert)
    except UserError as error:
        problem = error.problems[0]
        raise UserError.one(config.where(key, text), problem.why, f"{problem.fix}; {_TEMPLATE}") from None
