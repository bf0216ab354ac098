"""The recipe of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w

from titan_core.api import Config, UserError
from titan_core.toolkit.secrets import redact
from titan_core.toolkit.sections import JobSection


def write_recipe(path: Path, config: Config, command: str, summary: str) -> None:
    """Write ``config`` to the new file ``path``: the keys that its recipe, the command line and the plan set.

    Raises:
        UserError: the file exists, or cannot be written.
    """
    text = f"# Planned by `{command}`\n# {summary}\n\n{tomli_w.dumps(redact(tables_of(config)))}"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError.one(f"--out {path}", f"cannot be written: {error.strerror}", "name a new file") from None


def tables_of(config: Config) -> dict[str, dict[str, Any]]:
    """Return the keys of ``config`` that are set, by section. The run directory follows from the new file's name, unless the
    command line sets it."""
    tables: dict[str, dict[str, Any]] = {}
    for cls, section in config.sections.items():
        found = section.model_dump(exclude_unset=True, exclude_none=True)
        if cls is JobSection and "job.dump_folder" not in config.overridden:
            found.pop("dump_folder", None)
        if found:
            tables.setdefault(cls.section, {}).update(found)
    return tables
