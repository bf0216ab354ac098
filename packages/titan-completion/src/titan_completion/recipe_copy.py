"""A recipe with the documentation of its keys as comments, as a start for a recipe of one's own."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from titan_core.api import Model, Recipe, Registry, UserError
from titan_core.api.config.sections import JobSection, ModelSection
from titan_core.api.config.toml import BadToml, parse_toml
from titan_core.toolkit.fields import field_docs, model_at, type_name
from titan_core.toolkit.text import show

_WIDTH = 110
_DUMP_FOLDER = (JobSection.section, "dump_folder")
_HEADER = re.compile(r"\s*\[\[?([^\[\]]+)\]")
_KEY = re.compile(r"(\s*)([^\s=#\[][^=#]*?)\s*=")


def commented_copy(recipe: Recipe, registry: Registry) -> str:
    """Return the TOML of ``recipe`` without ``job.dump_folder``, its comments included. The documentation of each key, the
    same as in ``--help``, stands above the key.

    Raises:
        UserError: the recipe is not TOML, or sets ``job.dump_folder`` in an inline table.
    """
    text = recipe.file.read_text(encoding="utf-8")
    try:
        tables = parse_toml(text)
        copy = _with_docs(text.removesuffix("\n").split("\n"), _Docs.of(tables, registry))
        if isinstance(tables.get(JobSection.section), dict):
            tables[JobSection.section].pop("dump_folder", None)
        if parse_toml(copy) == tables:
            return copy
        why = "sets job.dump_folder in a form that cannot be removed"
    except BadToml as error:
        why = str(error)
    raise UserError.one(f"recipe {recipe.name!r}", why, "report it to the author of its plugin")


def commented(text: str, registry: Registry) -> str:
    """Return the TOML ``text`` with the documentation of each key above the key."""
    return _with_docs(text.removesuffix("\n").split("\n"), _Docs.of(parse_toml(text), registry))


@dataclass(frozen=True)
class _Docs:
    """Finds the documentation of keys."""

    sections: dict[str, list[type[BaseModel]]]
    flavor: BaseModel | None
    """The arguments that ``[model.args]`` overrides."""

    @classmethod
    def of(cls, tables: dict[str, Any], registry: Registry) -> _Docs:
        """Return the documentation for a recipe with ``tables``."""
        found = tables.get(ModelSection.section)
        table = found if isinstance(found, dict) else {}
        models = {model.name: model for model in registry.all(Model)}
        model = models.get(str(table.get("name", next(iter(models)) if len(models) == 1 else "")))
        flavor = model.flavors.get(str(table.get("flavor", ""))) if model is not None else None
        return cls({name: list(owners) for name, owners in registry.sections().items()}, flavor)

    def line(self, path: Sequence[str]) -> str:
        """Return type, default and documentation of the key at ``path`` in one line; empty if it is not known."""
        section, *inner = path
        if (section, inner[:1]) == (ModelSection.section, ["args"]) and inner[1:] and self.flavor is not None:
            cls, inner, of_flavor = type(self.flavor), inner[1:], self.flavor
        else:
            owners = (cls for cls in self.sections.get(section, []) if inner and inner[0] in cls.model_fields)
            cls, of_flavor = next(owners, BaseModel), None
        owner = model_at(cls, inner[:-1])
        field = owner.model_fields.get(inner[-1]) if owner is not None and inner else None
        if owner is None or field is None:
            return ""
        if of_flavor is not None and len(inner) == 1:
            default, noun = getattr(of_flavor, inner[0]), "the flavor has"
        else:
            default, noun = (None if field.is_required() else field.get_default(call_default_factory=True)), "default"
        shown = "" if default is None or default in ("", [], {}) else f", {noun} {show(default)}"
        return f"{field_docs(owner).get(inner[-1], '')} [{type_name(field.annotation)}{shown}]".strip()


def _with_docs(lines: list[str], docs: _Docs) -> str:
    """Return ``lines`` with the documentation of each key above it and its comments, and without ``job.dump_folder``."""
    written: list[str] = []
    table: tuple[str, ...] = ()
    skipping = False
    for number, line in enumerate(lines):
        if not _begins_statement(lines, number):  # a line within a value of several lines
            if not skipping:
                written.append(line)
            continue
        skipping = False
        if header := _HEADER.match(line):
            table = _parts(header[1])
        elif key := _KEY.match(line):
            path = (*table, *_parts(key[2]))
            skipping = path == _DUMP_FOLDER
            if skipping:
                continue
            above = len(written)
            while above and written[above - 1].lstrip().startswith("#"):
                above -= 1
            indent = f"{key[1]}# "
            written[above:above] = textwrap.wrap(
                docs.line(path), _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
            )
        written.append(line)
    return "\n".join(written) + "\n"


def _begins_statement(lines: list[str], number: int) -> bool:
    """Whether no value of several lines is open before line ``number``: then, and only then, the lines before are TOML."""
    try:
        parse_toml("\n".join(lines[:number]))
    except BadToml:
        return False
    return True


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
