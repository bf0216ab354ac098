"""titan-debug is discovered with its components."""

from __future__ import annotations

from titan_core.api import Command, Observer
from titan_core.plugins.registry import Components


def test_its_debuggers_and_commands_are_registered() -> None:
    registry = Components.from_installed()
    (plugin,) = (plugin for plugin in registry.found.plugins if plugin.distribution == "titan-debug")
    assert plugin.name == "debug"
    assert {"flight_recorder", "crash_recorder"} <= {
        component.name for component in plugin.components if isinstance(component, Observer)
    }
    assert {"analyse", "analyze", "flight dump"} <= {
        component.name for component in plugin.components if isinstance(component, Command)
    }
    assert registry.conflicts == []
