"""The command that trains on the machines of a cluster: checked as ``titan train`` checks it, and free of secrets."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from titan_cluster.options import Machines, job_name
from titan_cluster.secrets import secrets_in_options, secrets_in_overrides, secrets_in_recipe
from titan_core.api import Checkpoint, CommandContext, Problem, Recipe, UserError
from titan_core.api.config.resolved import COMMAND_LINE
from titan_core.api.config.sections import TrainingSection
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.files import read_bytes
from titan_core.toolkit.plugin_files import plugin_files
from titan_core.toolkit.text import say, shorten

LONGEST_RECIPE = 100_000
"""Most bytes of a recipe that is part of a rendered file."""


@dataclass(frozen=True)
class RecipeText:
    """The text of a recipe that is a file, as it was when the job was rendered: a job may wait for days."""

    name: str
    """Name of the file that it becomes on the cluster."""
    text: str


@dataclass(frozen=True)
class Training:
    """What every machine runs."""

    name: str
    """Name of the job."""
    run: str
    """The run's directory."""
    recipe: RecipeText | None
    """``None`` for a recipe that a plugin provides."""
    known_as: str
    """The recipe as the user wrote it."""
    overrides: tuple[str, ...]
    """``--section.key=VALUE``."""
    config: Mapping[str, Any]
    """The resolved config: sections, each of keys and plain values."""
    warning: str
    """What is lost when the cluster starts the job again; empty if it resumes."""

    def recipe_file(self, folder: PurePosixPath) -> str:
        """Return the path of the recipe in ``folder``, a path on the cluster; empty for a recipe that a plugin provides."""
        return "" if self.recipe is None else no_option(folder / self.recipe.name)

    def arguments(self, folder: PurePosixPath) -> list[str]:
        """Return the command line after ``titan``, without the launcher's options.

        Args:
            folder: where the recipe's text is on the cluster.
        """
        return ["train", self.recipe_file(folder) or self.known_as, *self.overrides]


def no_option(path: PurePosixPath) -> str:
    """Return ``path`` in a form that no command takes for an option."""
    return str(path) if path.is_absolute() else f"./{path}"


def training_of(context: CommandContext, machines: Machines, missing_ok: bool) -> Training:
    """Return the training command. Prints a note for each thing that the user should know about the job.

    Args:
        missing_ok: whether files that this machine lacks are notes, because the cluster has other file systems.

    Raises:
        UserError: the job is invalid on these machines, or a secret would be written to the rendered file.
    """
    for file in plugin_files():
        why = "stays on this machine, and the job would start without it"
        raise UserError.one(file.where, why, "install the plugin as a package on the machines of the cluster")
    recipe, text = context.arguments.recipe, None
    name = job_name(context.arguments.name, recipe)
    # The config knows how each key is spelt and validates it; an elastic job must be valid at both ends of its range.
    jobs = [
        context.job(number * machines.ranks, missing_ok=missing_ok)
        for number in sorted({machines.least, machines.most}, reverse=True)
    ]
    job = jobs[0]
    for note in dict.fromkeys(note for one in jobs for note in one.notes):
        say(f"titan: note: {note}", file=sys.stderr)
    overrides = [f"--{override.key}={override.text}" for override in context.overrides]
    problems = [*secrets_in_options(context.arguments), *secrets_in_overrides(context.overrides)]
    if "job.dump_folder" not in job.config.overridden:  # the default depends on the path of the recipe
        overrides.append(f"--job.dump_folder={job.dump_folder}")
    if recipe not in context.registry.names(Recipe):
        text = read_bytes(recipe).decode("utf-8-sig")
        problems += secrets_in_recipe(recipe, text)
        if len(text.encode()) > LONGEST_RECIPE:
            why = f"is longer than {LONGEST_RECIPE:,} bytes, and becomes a part of the rendered file"
            problems.append(Problem(shorten(recipe), why, "shorten it"))
    problems += [
        Problem(f"{COMMAND_LINE}: {shorten(argument)!a}", "contains bytes that are not UTF-8 text", "rename the file")
        for argument in (recipe, *overrides)
        if not _is_text(argument)
    ]
    if problems:
        raise UserError(*problems)
    embedded = None if text is None else RecipeText(f"{_plain(Path(recipe).stem)}.toml", text)
    return Training(name, job.dump_folder, embedded, recipe, tuple(overrides), job.config.as_dict(), _loss_at_restart(job))


def _loss_at_restart(job: AssembledJob) -> str:
    """Return what is lost when the cluster starts the job again, and the line of the recipe that prevents it; empty if the
    job resumes."""
    if job.checkpoint is None:
        sections = [one.config for one in job.registry.all(Checkpoint) if one.config is not None]
        keys = [f"{section.section}.enable = true" for section in sections if "enable" in section.model_fields]
        fix = f"set {' or '.join(keys)}" if keys else "install titan-ckpt, and set checkpoint.enable = true"
        return f"the job saves nothing: whenever the cluster starts it again, all of its steps are lost; {fix}"
    section = job.checkpoint.config
    values = {} if section is None else job.config.as_dict().get(section.section, {})
    interval, steps = values.get("interval", 0), job.config.section(TrainingSection).steps
    if section is None or interval < steps:
        return ""
    where = f"{section.section}.interval = {interval}, and the job has {steps} steps"
    return f"{where}: after a failure, all of them are lost; set {section.section}.interval to the work that may be repeated"


def _plain(stem: str) -> str:
    """Return a file name that every file system and every key of a ConfigMap may have."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-")[:100] or "recipe"


def _is_text(argument: str) -> bool:
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True
