"""Every function of a component is guarded: the functions are enumerated from the contract, so that a new field without a
guard fails here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from harness.guarded import end
from harness.odd_plugin import ORIGIN
from titan_core.api import Component, Phase, Ref
from titan_core.plugins.component_checks import GROUPS, with_origin
from titan_core.plugins.discovery import REGISTRATION_HOOKS
from titan_core.toolkit.errors import PluginFailure

KINDS = sorted(set(REGISTRATION_HOOKS.values()), key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_function_of_a_component_has_an_owner(kind: type[Component]) -> None:
    values: dict[str, Any] = {"name": "x", "summary": "", "phase": Phase.DATA, "flavors": {}, "package": "", "path": ""}
    known = {field.name for field in fields(kind)}
    component = with_origin(
        kind(**{**{name: value for name, value in values.items() if name in known}, **failing(kind)}), ORIGIN
    )
    for name, value in functions_in(component):
        if isinstance(value, Ref):
            assert value.purpose == name and value.origin is not None
            value = value.load()
        if name == "run":  # the command line names who raised in a command
            continue
        with pytest.raises(PluginFailure, match=f"plugin 'odd' .*: {kind.kind} 'x': {name} raised StopIteration"):
            value(None)


def failing(kind: type) -> dict[str, Any]:
    """Return a function that fails for each field of ``kind`` that has one."""
    found: dict[str, Any] = {}
    for field in fields(kind):
        if str(field.type).startswith("Ref["):
            found[field.name] = Ref("harness.guarded:end")
        elif str(field.type).startswith("Callable["):
            found[field.name] = end
        elif field.type in GROUPS:
            group = GROUPS[field.type]
            found[field.name] = group(**failing(group))
    return found


def functions_in(holder: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in fields(holder):
        value = getattr(holder, field.name)
        if field.type in GROUPS:
            yield from functions_in(value, f"{field.name}.")
        elif isinstance(value, Ref) or (callable(value) and not isinstance(value, type)):
            yield f"{prefix}{field.name}", value
