"""The options of ``titan train`` that start several processes: the installed launchers', or why there are none."""

from __future__ import annotations

import argparse
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


def add_launch_options(parser: argparse.ArgumentParser, registry: Registry) -> None:
    """Add the options of each installed launcher; without one, have those of torchrun refused with the fix."""
    launchers = registry.all(Launcher)
    for launcher in launchers:
        launcher.arguments.load()(parser)
    if not launchers:
        fix = f"{registry.remedy(PACKAGE)}, or start each rank with torchrun"
        parser.add_argument(*_WITHOUT_LAUNCHER, action=_refusal(fix), nargs="?", help=argparse.SUPPRESS)


def _refusal(fix: str) -> type[argparse.Action]:
    class Refuse(argparse.Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> NoReturn:
            raise UserError.one(str(option_string), "no plugin in use starts processes", fix)

    return Refuse
