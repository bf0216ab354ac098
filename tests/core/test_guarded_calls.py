"""What a plugin's function, hook or method raises is reported with the plugin's name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from harness.guarded import LIFECYCLE, NAMED, SPECS, Loss, end, raises
from harness.odd_plugin import ORIGIN
from titan_core.api import Finding, hookimpl
from titan_core.plugins.guard import PASSED_ON_BY, Origin
from titan_core.plugins.guarded_object import guarded_object
from titan_core.plugins.lifecycle import Lifecycle
from titan_core.plugins.result_objects import OBJECTS
from titan_core.plugins.results import RETURNS
from titan_core.toolkit.errors import Interrupted, PluginFailure


class Odd(BaseException):
    """An exception of a stranger."""


FAILURES: dict[str, Callable[..., Any]] = {
    "RuntimeError: odd": raises(RuntimeError("odd")),
    "SystemExit: 3": raises(SystemExit(3)),
    "Odd: odd": raises(Odd("odd")),
    "StopIteration": end,
}


def belongs_to(function: str, failure: str) -> bool:
    return any(failure.startswith(kind.__name__) for kind in PASSED_ON_BY.get(function, ()))


ROWS = [row for row in RETURNS if "." in row]


@pytest.mark.parametrize(
    ("row", "failure"),
    [(row, failure) for row in ROWS for failure in FAILURES if not belongs_to(row.partition(".")[2], failure)],
)
def test_a_function_that_fails_names_its_plugin(row: str, failure: str) -> None:
    function = row.partition(".")[2]
    with pytest.raises(PluginFailure, match=f"{NAMED}{function} raised {failure}"):
        ORIGIN.guard_ref(row, FAILURES[failure])()
    for interrupt in (KeyboardInterrupt, Interrupted):  # by a person, or by a signal
        with pytest.raises(interrupt):
            ORIGIN.guard_ref(row, raises(interrupt()))()


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("hook", LIFECYCLE)
def test_a_hook_that_fails_names_its_plugin(hook: str, failure: str) -> None:
    spec = SPECS[hook]
    names = ", ".join(inspect.signature(spec).parameters)
    namespace: dict[str, Any] = {"fails": FAILURES[failure]}
    exec(f"def {hook}(self, {names}): return fails()", namespace)
    observer = type("Observer", (), {hook: hookimpl(namespace[hook])})()
    lifecycle = Lifecycle()
    lifecycle.register(observer, origin=ORIGIN)
    arguments: list[Any] = [Finding("a", "b", 1) if names == "finding" else {} for _ in inspect.signature(spec).parameters]
    call = getattr(lifecycle, hook.removeprefix("titan_"), None)
    if call is None:  # called by the launcher, or for each observer on its own
        of_pluggy = getattr(lifecycle._manager.hook, hook)
        call = lambda *given: of_pluggy(**dict(zip(inspect.signature(spec).parameters, given, strict=True)))  # noqa: E731
    with pytest.raises(PluginFailure, match=f"{NAMED}{hook} raised {failure}"):
        call(*arguments)


def made(place: str) -> Any:
    """Return an object with all members of the class at ``place``."""
    if place.endswith(":ObjectiveFunction"):
        return Loss()
    weight = torch.nn.Parameter(torch.ones(1))
    if place == "torch.optim:Optimizer":
        return torch.optim.SGD([weight])
    if place.endswith(":LRScheduler"):
        return LambdaLR(torch.optim.SGD([weight]), lambda step: 1.0)
    return type("Made", (), dict.fromkeys(OBJECTS[place], end))()


@pytest.mark.parametrize("place", OBJECTS)
def test_a_method_that_fails_names_its_plugin(place: str) -> None:
    for name in OBJECTS[place]:
        for failure, fails in FAILURES.items():
            if belongs_to(name, failure):
                continue
            instance = made(place)
            instance.__class__ = type("Made", (type(instance),), {name: fails})
            guarded_object(ORIGIN, instance, OBJECTS[place], "thing", {})
            with pytest.raises(PluginFailure, match=f"{NAMED}{name} raised {failure}"):
                getattr(type(instance), name)(instance)


@pytest.mark.parametrize("place", OBJECTS)
def test_guarded_objects_remain_what_they_are(place: str) -> None:
    instance = made(place)
    cls, before = type(instance), dict(vars(instance))
    assert guarded_object(ORIGIN, instance, OBJECTS[place], "thing", {}) is instance
    assert isinstance(instance, cls) and type(instance).__name__ == cls.__name__ and vars(instance) == before
    other = Origin("other", "other", "1")
    assert guarded_object(other, instance, OBJECTS[place], "thing", {}) is instance  # keeps its first owner
    if place == "torch.optim:Optimizer":
        schedule = LambdaLR(instance, lambda step: 1.0)  # which replaces the optimizer's ``step``
        instance.step()
        schedule.step()


class Delegates:
    """Has only what another object has."""

    def __getattr__(self, name: str) -> Any:
        if name in ("step_unless",):
            return raises(RuntimeError("late"))
        raise AttributeError(name)


def test_methods_of_an_instance_are_guarded_too() -> None:
    members = OBJECTS["titan_core.api.training.optimizer:SkipsOnDevice"]
    made = guarded_object(ORIGIN, Delegates(), members, "SkipsOnDevice", {})
    with pytest.raises(PluginFailure, match=f"{NAMED}step_unless raised RuntimeError: late"):
        made.step_unless(None)
