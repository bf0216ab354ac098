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
    """Yield every function that installed components refer to and that takes a context: the context, the sections of these
    components, and the function."""
    sections: dict[tuple[str, str], set[str]] = {}
    for component in Components.from_installed().all(Component):
        for field in fields(component):
            ref = getattr(component, field.name)
            expected = CONTEXTS.get((component.kind, field.name), CONTEXTS.get(field.name))
            if isinstance(ref, Ref) and expected is not None:
                section = component.config.__name__ if component.config is not None else "None"
                sections.setdefault((ref.target, expected), set()).add(section)
    for (target, expected), named in sections.items():
        yield pytest.param(target, expected, named, id=target)


@pytest.mark.quick_rows(8)
@pytest.mark.parametrize(("target", "expected", "sections"), list(referred()))
def test_every_installed_function_takes_the_context_of_its_kind(target: str, expected: str, sections: set[str]) -> None:
    """The context has the section that the component names; that of a function that serves components with several sections
    may have any. The type checker can check neither through a reference."""
    parameter = inspect.signature(Ref[Any](target).load()).parameters["context"]
    section = sections.pop() if len(sections) == 1 else "Any"
    # Health checks belong to a machine, so their context has no section.
    assert parameter.annotation == (expected if expected == "HealthContext" else f"{expected}[{section}]")
