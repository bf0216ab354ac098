"""Detects foreign packages and commands named titan: the package ``titan-core`` of the public index, whose module and
command are called ``titan``, and any other ``titan`` command."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import importlib_metadata

from titan_core.api import CheckResult, Health, HealthContext, Problem, UserError
from titan_core.toolkit.files import open_file

if TYPE_CHECKING:
    from importlib_metadata import IDistribution as Installed

PACKAGE = "titan-core"
COMMAND = "titan"
_PLUGIN = "titan_core.plugin"
_START_OF_SCRIPT = 4096
"""Bytes: an installer's script is shorter."""
_SHELL = re.compile(rb"#!.*?\b(?:ba|da|k|z)?sh\b")
_PYTHON = re.compile(rb"^\s*(?:import|from)\s", re.MULTILINE)


@dataclass(frozen=True)
class NameTaken:
    """Something of another project with a name of Titan's."""

    what: str
    where: Path
    why: str
    fix: str
    hides_titan: bool = False
    """Whether Titan's plugins cannot be discovered because of it."""


def ours() -> Installed | None:
    """Return the distribution of this titan-core; ``None`` if it was not installed."""
    return next((one for one in _installed() if _is_ours(one)), None)


def _installed() -> list[Installed]:
    return list(importlib_metadata.distributions(name=PACKAGE))


def _is_ours(distribution: Installed) -> bool:
    return any(point.value == _PLUGIN for point in distribution.entry_points)


def taken_names() -> Iterator[NameTaken]:
    """Yield the packages ``titan-core`` on ``sys.path``, and the ``titan`` command first on ``PATH``, that are not Titan's.

    ``importlib.metadata`` knows one package of a name, the first on the path, so a foreign one before Titan's hides Titan's
    plugins.
    """
    installed = _installed()
    seen_ours = not any(map(_is_ours, installed))  # from its sources, Titan has no package that could be hidden
    for distribution in installed:
        if _is_ours(distribution):
            seen_ours = True
            continue
        folder = Path(str(distribution.locate_file("")))
        yield NameTaken(
            f"{PACKAGE} {distribution.version}", folder, "is another project's package with the name of Titan's",
            "uninstall it, and install Titan's wheel again if both are in this folder", hides_titan=not seen_ours,
        )  # fmt: skip
    command = foreign_command()
    if command is not None:
        yield NameTaken(
            f"the command `{COMMAND}`", command, "comes first on the PATH and is another program's",
            f"change the PATH, uninstall it, or write `{sys.executable} -m titan_core` for `{COMMAND}`",
        )  # fmt: skip


def foreign_command() -> Path | None:
    """Return the ``titan`` command that a shell finds, if it is another project's.

    An installer's script names the module that it starts. A shell script may start any program, as pyenv's do, and is not
    judged.
    """
    found = shutil.which(COMMAND)
    if found is None or os.path.realpath(found) == os.path.realpath(sys.argv[0]):
        return None
    try:
        with open_file(found) as file:
            start = file.read(_START_OF_SCRIPT)
    except OSError:
        return None  # only its owner can read it
    unknown = _SHELL.match(start) and not _PYTHON.search(start)  # a long path to Python is written in a shell's line
    return None if b"titan_core" in start or unknown else Path(found)


def check_start() -> None:
    """Print a warning to standard error for each name that is taken.

    Raises:
        UserError: another project's package hides Titan's.
    """
    taken = list(taken_names())
    hiding = [one for one in taken if one.hides_titan]
    if hiding:
        raise UserError(*(Problem(f"{one.what} in {one.where}", f"{one.why}, which it hides", one.fix) for one in hiding))
    for one in taken:
        print(f"titan: warning: {Problem(f'{one.what} ({one.where})', one.why, one.fix)}", file=sys.stderr)


def check_health(context: HealthContext) -> Iterator[CheckResult]:
    """Report names that are taken to ``titan doctor``."""
    for one in taken_names():
        yield CheckResult(one.what, Health.WARNING, f"{one.where} {one.why}", one.fix)
    distribution = ours()
    where = f"{distribution.version} in {distribution.locate_file('')}" if distribution is not None else "is not installed"
    yield CheckResult(PACKAGE, Health.OK, where)
