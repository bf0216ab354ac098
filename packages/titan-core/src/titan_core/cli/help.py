"""Help texts: ``titan --help``, ``titan GROUP --help`` and ``titan COMMAND --help [SECTION]``."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterable
from typing import Any, NoReturn

from titan_core.api import Command, UserError
from titan_core.api._shown import shorten
from titan_core.config.render import describe_keys
from titan_core.plugins.registry import Components
from titan_core.toolkit.errors import nearest
from titan_core.toolkit.text import say

WIDEST = 100
"""Maximum width of a help text, in columns."""
_CHOICE = re.compile(r"argument (?P<name>.+): invalid choice: '(?P<word>.*)' \(choose from (?P<choices>.*)\)", re.DOTALL)


def columns() -> int:
    """Return the width of help texts on this terminal."""
    return min(WIDEST, shutil.get_terminal_size().columns)


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose errors are reported like all other errors."""

    def __init__(self, **options: Any) -> None:
        def form(prog: str) -> argparse.HelpFormatter:
            return argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=columns())

        super().__init__(allow_abbrev=False, formatter_class=form, **options)
        self._positional_names: list[str] = []

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """See :meth:`argparse.ArgumentParser.add_argument`."""
        action = super().add_argument(*names, **options)
        if not action.option_strings:
            name = str(action.metavar or action.dest)
            self._positional_names.append(
                {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} ..."}.get(str(action.nargs), name)
            )
        return action

    def error(self, message: str) -> NoReturn:
        """Raise a user error."""
        found = _CHOICE.fullmatch(message)
        if found is None:
            raise UserError.one("command line", message, f"see `{self.prog} --help`")
        choices = [choice.strip("' ") for choice in found["choices"].split(",")]
        where = f"command line: {found['name']} {shorten(found['word'])}"
        raise UserError.one(where, "is not one of the choices", nearest(found["word"], choices))

    def option_names(self) -> list[str]:
        """Return the documented options."""
        heads = re.findall(r"^  (-.*?)(?:  |$)", self.format_help(), re.MULTILINE)
        return [name for head in heads for name in re.findall(r"--[A-Za-z][\w-]*(?![\w.-])", head)]

    def print_short_help(self) -> None:
        """Print the help with a usage of one line."""
        self.usage = " ".join(["%(prog)s [options]", *self._positional_names, "[--section.key VALUE ...]"])
        self.print_help()


def parser_of(command: Command, commands: Iterable[Command], registry: Components) -> CommandParser:
    """Return a parser for ``command`` with the help options, and nothing else.

    Args:
        commands: all commands.
    """
    parser = CommandParser(prog=f"titan {command.name}", description=command.summary, add_help=not command.overrides)
    inner = [f"  titan {one.name}" for one in commands if one.name.startswith(f"{command.name} ")]
    notes = ["subcommands, which have a help of their own:", *inner, ""] if inner else []
    if command.overrides:
        parser.add_argument("-h", action=_KeysHelp, nargs="?", registry=registry, help=argparse.SUPPRESS)
        shows = {"--help": "show this message (also -h), or document the keys of SECTION", "--help-all": "document all keys"}
        parser.add_argument(
            "--help", action=_KeysHelp, nargs="?", metavar="SECTION", registry=registry, help=shows["--help"]
        )
        parser.add_argument("--help-all", action=_KeysHelp, nargs=0, registry=registry, help=shows["--help-all"])
        notes += [
            "config overrides:",
            *_row("--section.key VALUE", "set a key; booleans also as --section.key and --no-section.key"),
            *_row("for example", "--training.steps 100 --optimizer.lr 1e-3 --validation.enable"),
            *_row("sections", ", ".join(registry.sections())),
        ]
    parser.epilog = "\n".join(notes)
    return parser


def _row(name: str, text: str) -> list[str]:
    """Return a row of two columns, as argparse prints options."""
    return textwrap.wrap(text, columns() - 2, initial_indent=f"  {name}".ljust(29), subsequent_indent=" " * 29)


class _KeysHelp(argparse.Action):
    """Prints the help of a command that takes overrides, or of a section or key, and exits."""

    def __init__(self, registry: Components, **options: Any) -> None:
        super().__init__(default=argparse.SUPPRESS, **options)
        self._registry = registry

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, values: Any, option: str | None = None) -> None:
        assert isinstance(parser, CommandParser)
        if isinstance(values, str):
            say("\n".join(self._keys(values, option or "--help")))
        else:
            parser.print_short_help()
        if self.nargs == 0:
            for section in self._registry.sections():
                say("\n".join(["", f"[{section}]", *describe_keys(self._registry, section, width=columns())]))
        parser.exit()

    def _keys(self, name: str, option: str) -> list[str]:
        section, _, key = name.removeprefix("--").strip("[]").replace("-", "_").partition(".")
        where, sections = f"command line: {option} {shorten(name)}", list(self._registry.sections())
        if section not in sections:
            raise UserError.one(where, "is not a section of the config", nearest(section, sections))
        lines = describe_keys(self._registry, section, key or None, columns())
        if not lines:
            keys = [field for cls in self._registry.sections()[section] for field in cls.model_fields]
            raise UserError.one(where, f"section [{section}] has no such key", nearest(key, keys))
        return [f"[{section}]", *lines]


GROUPS = ("train", "look", "data and models", "plan", "clusters", "plugins")
"""The headings of ``titan --help``, in order."""


def overview(commands: Iterable[Command]) -> str:
    """Return the help of ``titan``: one screen, one line for each command and for the commands of one first word."""
    rows: dict[str, dict[str, list[Command]]] = {group: {} for group in GROUPS}
    for command in commands:
        if not command.rare:
            rows.setdefault(command.group, {}).setdefault(command.name.partition(" ")[0], []).append(command)
    width = max(len(name) for names in rows.values() for name in names) + 5
    lines = ["usage: titan COMMAND ...", "", "Pre-train language models with jobs assembled from plugins.", ""]
    for group, names in rows.items():
        lines += [f"{group}:"] if names else []
        for name, found in names.items():
            lines.append(textwrap.shorten(_summary(found), columns() - width, placeholder=" ..."))
            lines[-1] = f"  {name}".ljust(width) + lines[-1]
    return "\n".join([*lines, "", "See `titan COMMAND --help`, `titan --help-all` and `titan --version`."])


def _summary(commands: list[Command]) -> str:
    """Return what ``titan --help`` says about commands of one first word."""
    whole = [command for command in commands if " " not in command.name]
    if whole:
        return whole[0].summary
    if len(commands) == 1:
        return f"{commands[0].name.partition(' ')[2]}: {commands[0].summary}"
    return ", ".join(command.name.partition(" ")[2] for command in commands)


def listing(commands: Iterable[Command], group: str = "") -> str:
    """Return the help of a group of commands, or of all."""
    commands = list(commands)
    names = [f"  titan {command.name}" for command in commands]
    width = max(map(len, names)) + 3
    lines = [f"usage: {f'titan {group}' if group else 'titan'} COMMAND ...", ""]
    for name, command in zip(names, commands, strict=True):
        lines += textwrap.wrap(command.summary, columns(), initial_indent=name.ljust(width), subsequent_indent=" " * width)
    lines += ["", "See `titan COMMAND --help`. TITAN_TRACEBACK=1 shows the tracebacks of errors."]
    if not group:
        lines.append("`titan --plugin FILE COMMAND ...` loads a plugin from a file.")
    return "\n".join(lines)
