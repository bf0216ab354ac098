"""The launch options of ``titan train``, provided by the installed launchers."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any, NoReturn

from titan_core.api import UserError
from titan_core.plugins.providers import index
from titan_core.plugins.registry import Components
from titan_core.toolkit.launching import Launcher
from titan_core.toolkit.text import say


class LaunchOptions:
    """Adds the options of each launcher to ``parser``. A launcher whose options cannot be added is skipped with a warning,
    because a job in this process does not need it. Options of packages that are not in use are errors that name the fix."""

    def __init__(self, parser: argparse.ArgumentParser, registry: Components, command: str) -> None:
        self._registry = registry
        self._defaults: dict[str, dict[str, Any]] = {}
        self._launchers = [one for one in registry.all(Launcher) if not one.commands or command in one.commands]
        self._own = type(parser)(add_help=False)
        for launcher in self._launchers:
            alone = type(parser)(add_help=False)
            try:
                add = launcher.arguments.load()
                add(alone)
                defaults = vars(alone.parse_args([]))
                add(parser)
                add(self._own)
            except UserError as error:
                say(f"titan: warning: launcher {launcher.name!r} is ignored: {error}", file=sys.stderr)
                continue
            self._defaults[launcher.name] = defaults
        in_use = {plugin.distribution for plugin in registry.found.plugins}
        for option, package in index().get("option", {}).items():
            if package not in in_use:
                refused = _refusal(f"is provided by {package}", registry.remedy(package))
                with contextlib.suppress(argparse.ArgumentError):  # another launcher has an option of this name
                    parser.add_argument(option, action=refused, nargs="?", help=argparse.SUPPRESS)

    def removed_from(self, arguments: list[str]) -> list[str]:
        """``arguments`` without the options of launchers."""
        return self._own.parse_known_args(arguments)[1]

    def requested(self, arguments: argparse.Namespace) -> Launcher | None:
        """Return the launcher with an option that differs from its default, if any.

        Raises:
            UserError: several launchers have one, or several plugins claim the launcher's name.
        """
        values = vars(arguments)
        found = [
            launcher
            for launcher in self._launchers
            if any(values[name] != default for name, default in self._defaults.get(launcher.name, {}).items())
        ]
        for launcher in found:
            self._registry.require_unclaimed(Launcher.kind, launcher.name)
        if len(found) > 1:
            names = ", ".join(launcher.name for launcher in found)
            raise UserError.one(
                "command line", f"uses options of several launchers: {names}", "use the options of one launcher"
            )
        return found[0] if found else None


def _refusal(why: str, fix: str) -> type[argparse.Action]:
    class Refuse(argparse.Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> NoReturn:
            raise UserError.one(str(option_string), why, fix)

    return Refuse
