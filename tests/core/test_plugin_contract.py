"""Every function that a plugin may provide is guarded: the functions are enumerated from the contract, so that a new hook,
field or method without a guard fails here."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, Protocol

import pytest

import titan_core.api
import titan_core.toolkit
from harness.guarded import LIFECYCLE, SPECS, end
from harness.odd_plugin import ORIGIN
from titan_core.api import Component, Mixer, ModelDefinition, Phase, Ref, WeightFormat
from titan_core.plugins.component_checks import GROUPS, with_origin
from titan_core.plugins.discovery import REGISTRATION_HOOKS
from titan_core.plugins.result_objects import OBJECTS
from titan_core.plugins.results import RETURNS
from titan_core.toolkit.errors import PluginFailure

KINDS = sorted(set(REGISTRATION_HOOKS.values()), key=lambda kind: kind.__name__)
CORES_OWN = {
    "CodeOrigin", "Registry", "CommandContext", "CheckpointEvents", "DataPosition", "StoredModels", "ModelTrial",
    "DataReplay", "RandomAccess", "Simulation", "DecoderArgs",
}  # fmt: skip
"""Protocols that the core implements, or that a plugin only passes to a function of the contract."""
BASES = {"DeferredReports", "ObjectiveFunction"}
"""Base classes of which other functions are guarded: the hooks of an observer, and the objective as a function."""
COPIES = {"DatasetSpec.build", "FormatSpec.convert", "StreamSpec.tokenizer", "TokenizerSpec.build"}
"""Fields that hold a component's reference, which is guarded."""


def api_classes() -> Iterator[type]:
    """Yield the classes that the modules of the contract and of the toolkit define."""
    packages = (titan_core.api, titan_core.toolkit)
    for module in (one for package in packages for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")):
        found = import_module(module.name)
        yield from (cls for _, cls in inspect.getmembers(found, inspect.isclass) if cls.__module__ == module.name)


def members_of(protocol: type) -> set[str]:
    own = {
        name for cls in protocol.__mro__ if getattr(cls, "_is_protocol", False) and cls is not Protocol for name in vars(cls)
    }
    return {name for name in own if name in ("__call__", "__iter__", "__next__") or not name.startswith("_")}


def test_every_hook_has_a_row() -> None:
    assert set(LIFECYCLE) == {row for row in RETURNS if "." not in row}
    assert set(REGISTRATION_HOOKS) < set(SPECS)


def test_every_reference_of_the_contract_has_a_row() -> None:
    fields_of = [(cls, field) for cls in api_classes() if is_dataclass(cls) for field in fields(cls)]
    references = {f"{cls.__name__}.{field.name}" for cls, field in fields_of if str(field.type).startswith("Ref[")}
    functions = {
        f"{cls.__name__}.{field.name}" for cls, field in fields_of
        if "Callable[" in str(field.type) and (issubclass(cls, Component) or cls in (ModelDefinition, Mixer, WeightFormat))
    }  # fmt: skip
    groups = {str(field.type): f"{cls.__name__}.{field.name}" for cls, field in fields_of if field.type in GROUPS}
    assert len(groups) == len(GROUPS)
    rows = {
        ".".join((groups.get(row.partition(".")[0], row.partition(".")[0]), row.partition(".")[2])) for row in references
    }
    of_parts = {
        "ModelLayout.buffers",
        *(f"ModelPart.{one}" for one in ("batch_transforms", "after_evaluation", "weights_changed")),
    }
    rows |= functions
    inherited = {row for row in rows if row.partition(".")[2] in {f.name for f in fields(Component)}}
    assert (rows | of_parts) - COPIES - inherited == {row for row in RETURNS if "." in row}


def test_every_protocol_and_base_class_of_the_contract_has_its_methods_guarded() -> None:
    protocols = {
        f"{cls.__module__}:{cls.__name__}": members_of(cls) for cls in api_classes()
        if getattr(cls, "_is_protocol", False) and cls.__name__ not in CORES_OWN
    }  # fmt: skip
    bases = {
        f"{cls.__module__}:{cls.__name__}": {name for name in vars(cls) if not name.startswith("_")} for cls in api_classes()
        if inspect.isabstract(cls) and not getattr(cls, "_is_protocol", False) and cls.__name__ not in BASES
    }  # fmt: skip
    guarded = {place: set(rows) for place, rows in OBJECTS.items()}
    expected = protocols | bases
    assert {place: guarded.get(place) for place in expected} == expected


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_function_of_a_component_has_an_owner(kind: type[Component]) -> None:
    values: dict[str, Any] = {"name": "x", "summary": "", "phase": Phase.DATA, "flavors": {}, "package": "", "path": ""}
    known = {field.name for field in fields(kind)}
    component = with_origin(
        kind(**{**{name: value for name, value in values.items() if name in known}, **failing(kind)}), ORIGIN
    )
    for name, value in functions_in(component):
        if isinstance(value, Ref):
            assert value.purpose in RETURNS and value.origin is not None
            value = value.load()
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
