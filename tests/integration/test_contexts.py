"""The functions that installed components refer to take the contexts that they are called with."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from titan_core.api.components import Component
from titan_core.api.ref import Ref
from titan_core.plugins.registry import Registry

CONTEXTS = {
    "apply": "TrainingContext",
    "check_model": "TrainingContext",
    "step": "TrainingContext",
    "observe": "TrainingContext",
    "hardware": "JobContext",
    ("dataset", "check"): "DatasetContext",
    "check": "JobContext",
    ("dataset", "build"): "DatasetContext",
    ("debug", "build"): "JobContext",
    ("objective", "build"): "TrainingContext",
    ("tokenizer", "build"): "TokenizerContext",
    ("optimizer", "build"): "OptimizerContext",
    ("lr schedule", "build"): "LRScheduleContext",
    ("checkpoint", "build"): "CheckpointContext",
    ("metric logger", "build"): "LoggerContext",
}
"""By a component's field, or its kind and field."""


def referred() -> Iterator[Any]:
    """Every reference to a function that takes a context, of every installed component."""
    for component in Registry.from_installed().all(Component):
        for field in fields(component):
            ref = getattr(component, field.name)
            expected = CONTEXTS.get((component.kind, field.name), CONTEXTS.get(field.name))
            if isinstance(ref, Ref) and expected is not None:
                yield pytest.param(component, ref.target, expected, id=f"{component.kind} {component.name}.{field.name}")


@pytest.mark.parametrize(("component", "target", "expected"), list(referred()))
def test_every_installed_function_takes_the_context_of_its_kind(component: Component, target: str, expected: str) -> None:
    """With the section that the component names: the type checker sees neither through a reference."""
    function = Ref[Any](target).load()
    parameter = inspect.signature(function).parameters["context"]
    section = component.config.__name__ if component.config is not None else "None"
    assert parameter.annotation == f"{expected}[{section}]"
