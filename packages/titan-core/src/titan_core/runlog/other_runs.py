"""Keeps runs of different recipes or models out of each other's directories. Free of torch.

The default directory is ``outputs/<recipe>``, so two files of one name, a recipe and its edited copy, or a recipe that is
trained with another model, share it. A fresh start moves the files of an earlier run away. That is right for a repetition of
this run, but not for another one.
"""

from __future__ import annotations

import itertools
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from titan_core.api import Recipe, UserError
from titan_core.api._shown import show
from titan_core.api.config.secrets import redact_text
from titan_core.api.config.toml import parse_toml
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.config.render import to_toml
from titan_core.toolkit.files import read_text
from titan_core.toolkit.json_lines import records_of
from titan_core.toolkit.runs.files import CONFIG, EVENTS

log = logging.getLogger(__name__)

_ABOUT_MODEL = ("name", "flavor", "args")


def recipe_of(job: AssembledJob) -> str:
    """Return the recipe of ``job`` as the start event records it: the name of a plugin's recipe, or the path of a file,
    relative to the run's directory, so that both may move together. Secrets are removed."""
    source = job.config.source
    if source in job.registry.names(Recipe):
        return source
    return redact_text(os.path.relpath(Path(source).resolve(), Path(job.dump_folder).resolve()))


def require_own_run(folder: Path, job: AssembledJob) -> None:
    """Check that a fresh start of ``job`` may move the run in ``folder`` away: the run is one of the same recipe and model,
    or there is none. Unreadable files of a run are not compared.

    Raises:
        UserError: ``folder`` contains another run.
    """
    other = _other_recipe(folder, job) or _other_model(folder, job)
    if other:
        fix = f"add --job.dump_folder {_free(folder)}, or move or delete {folder}"
        raise UserError.one(job.config.where("job.dump_folder", job.dump_folder), f"contains a run of another {other}", fix)


def warn_of_other_recipe(folder: Path, job: AssembledJob) -> None:
    """Warn that ``job`` continues a run of another recipe in ``folder``. Its checkpoint has decided that it may."""
    if other := _other_recipe(folder, job):
        log.warning("%s contains a run of another %s, which continues with %s", folder, other, job.config.source)


def _other_recipe(folder: Path, job: AssembledJob) -> str:
    """Return the recipe of the run in ``folder``; empty if it is that of ``job``, or not known."""
    before: Any = None
    with suppress(UserError, OSError):
        for _, event in records_of(folder / EVENTS):
            if event.get("event") == "start":
                before = event.get("recipe")
    now = recipe_of(job)
    if not isinstance(before, str) or before == now or _inside(now):
        return ""
    named = before if before in job.registry.names(Recipe) else os.path.relpath(folder.resolve() / before)
    return f"recipe ({named})"


def _inside(recipe: str) -> bool:
    """Whether ``recipe`` is the config that a run in this directory wrote."""
    return Path(recipe).name == CONFIG and not recipe.startswith(os.pardir)


def _other_model(folder: Path, job: AssembledJob) -> str:
    """Return the model of the run in ``folder``; empty if it is that of ``job``, or not known."""
    before: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        before = parse_toml(read_text(folder / CONFIG, inside=folder)).get("model") or {}
    now = parse_toml(to_toml(job.run_config))["model"]  # in the form in which the run wrote it
    changed = [key for key in _ABOUT_MODEL if before and before.get(key) != now.get(key)]
    return f"model ({', '.join(f'{key} = {show(before.get(key))}' for key in changed)})" if changed else ""


def _free(folder: Path) -> Path:
    """Return a folder beside ``folder`` that does not exist."""
    named = folder if folder.name not in ("", os.pardir) else folder.resolve()  # "." and ".." have no name
    beside = (named.parent / f"{named.name or 'run'}-{number}" for number in itertools.count(2))
    return next(path for path in beside if not path.exists())
