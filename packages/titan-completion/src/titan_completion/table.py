"""Everything that a shell completes, as lines of tab-separated columns.

| kind | of | name | values | description |
| --- | --- | --- | --- | --- |
| ``c`` | | command | ``+`` if it takes config overrides | summary |
| ``p`` | command | | values of its positional arguments | |
| ``o`` | command | option | values | help |
| ``k`` | | ``--section.key`` | values | documentation |
| ``n`` | | ``--no-section.key`` | ``-`` | documentation |

Values are words separated by spaces. A leading ``?`` means that the value may be omitted, a leading ``/`` that files are
completed too. ``-`` is an option without a value, ``@`` a value that cannot be completed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import Any

from titan_core.api import Command, Component, Recipe, Registry
from titan_core.toolkit.fields import (
    MODEL_ARGS,
    accepts_boolean,
    accepts_path,
    choices_at,
    field_at,
    field_docs,
    model_families,
)
from titan_core.toolkit.launching import Launcher

_LONGEST_DESCRIPTION = 70
_PATHS = re.compile(r"FILE|DIR|PATH|FOLDER|RUN|CHECKPOINT|MODEL|TRACE")
"""Metavariables of arguments that are paths."""


def rows(registry: Registry) -> list[str]:
    """Return the table of the installed plugins."""
    commands = registry.all(Command)
    found = [_row("c", "", command.name, "+" if command.overrides else "", command.summary) for command in commands]
    for command in commands:
        found += _arguments_of(command, registry)
    return [*found, *_keys(registry)]


def _arguments_of(command: Command, registry: Registry) -> Iterator[str]:
    parser = _RecordingParser()
    if command.arguments is not None:
        command.arguments.load()(parser)
    for launcher in registry.all(Launcher) if command.launches else ():
        launcher.arguments.load()(parser)
    if command.overrides:
        yield _row("o", command.name, "--help", f"?{' '.join(registry.sections())}", "document the keys of a section")
        yield _row("o", command.name, "--help-all", "-", "document all keys")
    else:
        yield _row("o", command.name, "--help", "-", "show the help")
    for action in parser.recorded:
        if action.help == argparse.SUPPRESS:
            continue
        if not action.option_strings:
            yield _row("p", command.name, "", _values_of(action, registry), "")
        for option in action.option_strings:
            yield _row("o", command.name, option, _values_of(action, registry), action.help or "")


def _values_of(action: argparse.Action, registry: Registry) -> str:
    if action.nargs == 0:
        return "-"
    if action.choices is not None:
        return " ".join(map(str, action.choices))
    if action.dest == Recipe.kind:
        return "/" + " ".join(registry.names(Recipe))
    if named := [component.name for component in registry.all(Component) if component.kind == action.dest]:
        return " ".join(named)  # such as --dataset NAME
    is_path = action.type is None and (not action.option_strings or _PATHS.search(str(action.metavar)))
    return "/" if is_path else "@"


def _keys(registry: Registry) -> Iterator[str]:
    owners = [(section, cls) for section, classes in registry.sections().items() for cls in classes]
    for section, cls in [*owners, *((MODEL_ARGS, cls) for cls in model_families(registry).values())]:
        docs = field_docs(cls)
        for name in cls.model_fields:
            key = f"{section}.{name}"
            field = field_at(registry, key)
            if field is None:
                continue
            values = " ".join(choices_at(registry, key, field))
            text = docs.get(name, "")
            if accepts_boolean(field):
                yield _row("n", "", f"--no-{key}", "-", text)
                values = f"?{values}"
            yield _row("k", "", f"--{key}", values or ("/" if accepts_path(field) else "@"), text)


def _row(*columns: str) -> str:
    """Return a line; the last column, a description, is shortened."""
    *others, text = (" ".join(column.split()) for column in columns)
    sentence = text.partition(". ")[0].rstrip(".")
    if len(sentence) > _LONGEST_DESCRIPTION:
        sentence = f"{sentence[: _LONGEST_DESCRIPTION - 3]}..."
    return "\t".join([*others, sentence.replace("%(default)s", "...")])


class _RecordingParser(argparse.ArgumentParser):
    """A parser that records the arguments that are added to it or to its groups, in order."""

    def __init__(self) -> None:
        self.recorded: list[argparse.Action] = []
        super().__init__(add_help=False)

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        return self._recorded(super().add_argument(*names, **options))

    def add_argument_group(self, *arguments: Any, **options: Any) -> Any:
        return self._recording(super().add_argument_group(*arguments, **options))

    def add_mutually_exclusive_group(self, **options: Any) -> Any:
        return self._recording(super().add_mutually_exclusive_group(**options))

    def _recording(self, group: Any) -> Any:
        add = group.add_argument
        group.add_argument = lambda *names, **options: self._recorded(add(*names, **options))
        return group

    def _recorded(self, action: argparse.Action) -> argparse.Action:
        self.recorded.append(action)
        return action
