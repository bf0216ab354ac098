"""The plugin as it is discovered."""

from __future__ import annotations

from titan_core.api.components import Phase, Transform
from titan_core.plugins.registry import Registry


def test_it_is_found_and_registers_precisions() -> None:
    (plugin,) = (plugin for plugin in Registry.from_installed().found.plugins if plugin.distribution == "titan-float8")
    assert plugin.name == "float8"
    assert {(one.name, one.phase) for one in plugin.components if isinstance(one, Transform)} == {
        ("float8", Phase.PRECISION),
        ("mxfp8", Phase.PRECISION),
    }
