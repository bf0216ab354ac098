"""The options of ``titan train`` that start several processes: the installed launchers', or why there are none."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from titan_core.api.errors import UserError
from titan_core.api.launcher import Launcher
from titan_core.plugins.registry import Registry

PACKAGE = "titan-launch"
"""Has the local launcher."""
_WITHOUT_LAUNCHER = (
    "--nproc-per-node",
    "--nnodes",
    "--node-rank",
    "--rdzv-endpoint",
    "--rdzv-backend",
    "--rdzv-id",
    "--rdzv-timeout",
    "--max-restarts",
)
"""Torchrun's names, which its users try first."""


class LaunchOptions:
    """Adds the options of each installed launcher to ``parser``; without one, has those of torchrun refused with the fix. A
    launcher whose options cannot be added is reported and left out: a job in this process does not need it."""

    def __init__(self, parser: argparse.ArgumentParser, registry: Registry) -> None:
        self._defaults: dict[str, dict[str, Any]] = {}
        self._launchers = registry.all(Launcher)
        for launcher in self._launchers:
            alone = type(parser)(add_help=False)
            try:
                add = launcher.arguments.load()
                add(alone)
                defaults = vars(alone.parse_args([]))
                add(parser)
            except UserError as error:
                print(f"titan: warning: launcher {launcher.name!r} is left out: {error}", file=sys.stderr)
                continue
            self._defaults[launcher.name] = defaults
        if not self._launchers:
            fix = f"{registry.remedy(PACKAGE)}, or start each rank with torchrun"
            parser.add_argument(*_WITHOUT_LAUNCHER, action=_refusal(fix), nargs="?", help=argparse.SUPPRESS)

    def requested(self, arguments: argparse.Namespace) -> Launcher | None:
        """The launcher that has an option with another value than its default.

        Raises:
            UserError: several have one.
        """
        given = vars(arguments)
        found = [
            launcher
            for launcher in self._launchers
            if any(given[name] != value for name, value in self._defaults.get(launcher.name, {}).items())
        ]
        if len(found) > 1:
            names = ", ".join(launcher.name for launcher in found)
            raise UserError.one("command line", f"options of several launchers: {names}", "give those of one")
        return found[0] if found else None


def _refusal(fix: str) -> type[argparse.Action]:
    class Refuse(argparse.Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> NoReturn:
            raise UserError.one(str(option_string), "no plugin in use starts processes", fix)

    return Refuse
