"""Rendering of a config as TOML, and of its keys as help text."""

from __future__ import annotations

from pydantic import BaseModel

from titan_core.api import Config, Registry
from titan_core.api._shown import is_obeyed, show
from titan_core.api.config.secrets import redact
from titan_core.toolkit.fields import MODEL_ARGS, choices_at, choices_of, field_docs, model_families, type_name


def to_toml(config: Config) -> str:
    """Return the resolved config, with every section and key, as TOML that resolves to the same config.

    Secrets are removed, because no output may contain them. The recipe is rejected until they are set again.
    """
    import tomli_w  # needed only here, and every command imports this module

    text = tomli_w.dumps(redact(config.tables()))
    return "".join(f"\\u{ord(one):04x}" if is_obeyed(one) else one for one in text)  # only texts can contain them


def describe_keys(registry: Registry, section: str, key: str | None = None, width: int = 100) -> list[str]:
    """Return the help text of the keys of a section (default: all of them): types, defaults, documentation and choices."""
    import textwrap

    owners: list[tuple[str, type[BaseModel]]] = [(section, cls) for cls in registry.sections()[section]]
    if section == MODEL_ARGS.partition(".")[0]:
        owners += [(MODEL_ARGS, cls) for cls in model_families(registry).values()]
    lines = []
    for prefix, cls in owners:
        docs = field_docs(cls)
        for name, field in cls.model_fields.items():
            path = f"{prefix}.{name}"
            if key is not None and path != f"{section}.{key}":
                continue
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            shown = "" if default is None or default == "" else f" (default {show(default)})"
            names = choices_at(registry, path, field)
            listed = "" if names == choices_of(field.annotation) else f" Installed: {', '.join(names)}."
            head = f"  --{path} {type_name(field.annotation)}"
            if len(head) > width:  # several lines need spaces
                head = head.replace("|", " | ")
            lines += textwrap.wrap(head, width, subsequent_indent=" " * 10, break_on_hyphens=False)
            text = f"{docs.get(name, '')}{shown}{listed}".strip()
            lines += textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return lines
