"""titan-debug is found, with what it offers."""

from __future__ import annotations

from titan_core.api.command import Command
from titan_core.api.components import Debugger
from titan_core.plugins.registry import Registry


def test_it_offers_debuggers_and_commands() -> None:
    registry = Registry.from_installed()
    (plugin,) = (plugin for plugin in registry.found.plugins if plugin.distribution == "titan-debug")
    assert plugin.name == "debug"
    assert {"flight_recorder", "crash_report"} <= {one.name for one in plugin.components if isinstance(one, Debugger)}
    assert {"flight analyse", "flight dump"} <= {one.name for one in plugin.components if isinstance(one, Command)}
    assert registry.conflicts == []
