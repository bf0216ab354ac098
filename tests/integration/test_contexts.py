"""Each function that an installed component refers to accepts the context that it is called with."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from titan_core.api import Component, Ref
from titan_core.plugins.registry import Components

CONTEXTS = {
    "apply": "TrainingContext",
    "check_model": "TrainingContext",
    "step": "TrainingContext",
    "observe": "TrainingContext",
    "hardware": "JobContext",
    ("dataset", "check"): "DatasetContext",
    ("health check", "check"): "HealthContext",
    "check": "JobContext",
    ("dataset", "build"): "DatasetContext",
    ("observer", "build"): "JobContext",
    ("objective", "build"): "TrainingContext",
    ("tokenizer", "build"): "TokenizerContext",
    ("optimizer", "build"): "OptimizerContext",
    ("lr schedule", "build"): "LRScheduleContext",
    ("checkpoint", "build"): "CheckpointContext",
}
"""The expected context, by a component's field or by its kind and field."""


def referred() -> Iterator[Any]:
    """Yield every reference of every installed component to a function that takes a context."""
    for component in Components.from_installed().all(Component):
        for field in fields(component):
            ref = getattr(component, field.name)
            expected = CONTEXTS.get((component.kind, field.name), CONTEXTS.get(field.name))
            if isinstance(ref, Ref) and expected is not None:
                yield pytest.param(component, ref.target, expected, id=f"{component.kind} {component.name}.{field.name}")


@pytest.mark.parametrize(("component", "target", "expected"), list(referred()))
def test_every_installed_function_takes_the_context_of_its_kind(component: Component, target: str, expected: str) -> None:
    """The context has the section that the component names. The type checker can check neither through a reference."""
    function = Ref[Any](target).load()
    parameter = inspect.signature(function).parameters["context"]
    section = component.config.__name__ if component.config is not None else "None"
    # Health checks belong to a machine, so their context has no section.
    assert parameter.annotation == (expected if expected == "HealthContext" else f"{expected}[{section}]")
