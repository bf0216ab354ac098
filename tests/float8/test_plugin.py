"""titan-float8 is found, and honest about what it offers."""

from __future__ import annotations

from titan_core.registry import Registry


def test_it_is_found_and_registers_nothing_yet() -> None:
    (plugin,) = (plugin for plugin in Registry.from_installed().found.plugins if plugin.distribution == "titan-float8")
    assert plugin.name == "float8"
    assert plugin.components == ()
