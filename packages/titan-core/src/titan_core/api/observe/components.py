"""Observers, which watch a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from titan_core.api.plugins.component import Component
from titan_core.api.plugins.contexts import JobContext
from titan_core.api.plugins.errors import Problem
from titan_core.api.plugins.ref import Ref


@dataclass(frozen=True, kw_only=True)
class Debugger(Component):
    """An observer of a run: an object with lifecycle hooks, built if the job selects it."""

    kind = "debug"
    build: Ref[Callable[[JobContext[Any]], object]]
    active: Callable[[JobContext[Any]], bool]
    check: Ref[Callable[[JobContext[Any]], Iterable[Problem]]] | None = None
    """Returns the reasons why the job cannot run, before anything is built. Called if active; must not import torch."""
