"""The hooks of the contract, and functions of a plugin that fail or wrongly return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from titan_core.api import ObjectiveFunction, hookspecs
from titan_core.plugins.discovery import REGISTRATION_HOOKS
from titan_core.toolkit import hookspecs as toolkit_hooks

NAMED = r"plugin 'odd' \(titan-odd 1\.2\): transform 'odd': "
"""How an error begins that names the plugin of :data:`harness.odd_plugin.ORIGIN`."""
SPECS = {
    name: value
    for module in (hookspecs, toolkit_hooks)
    for name, value in vars(module).items()
    if hasattr(value, "titan_spec")
}
"""Hook specifications, by name."""
LIFECYCLE = [name for name in SPECS if name not in REGISTRATION_HOOKS]
"""Hooks of observers and of jobs."""


def end(*_: object) -> object:
    """Raise StopIteration."""
    return next(iter(()))


def raises(error: BaseException) -> Callable[..., Any]:
    """Return a function that raises ``error``."""

    def function(*_: object, **__: object) -> object:
        raise error

    return function


class Loss(ObjectiveFunction):
    """Is 1."""

    def __call__(self, *arguments: Any) -> Any:
        return torch.ones(())
