"""Discovery of the plugin."""

from __future__ import annotations

from titan_core.api import Phase, Transform
from titan_core.plugins.registry import Components


def test_the_plugin_registers_its_precisions() -> None:
    (plugin,) = (plugin for plugin in Components.from_installed().found.plugins if plugin.distribution == "titan-float8")
    assert plugin.name == "float8"
    assert {(component.name, component.phase) for component in plugin.components if isinstance(component, Transform)} == {
        ("float8", Phase.PRECISION),
        ("mxfp8", Phase.PRECISION),
    }
