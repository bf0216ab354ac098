"""What titan-debug contributes."""

from __future__ import annotations

from titan_core.components import Command, Debugger
from titan_core.hookspecs import hookimpl

api = (1, 0)


@hookimpl
def titan_debuggers() -> list[Debugger]:
    return []


@hookimpl
def titan_commands() -> list[Command]:
    return []
