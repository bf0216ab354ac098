"""Observers, which watch a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from titan_core.api.plugins.component import Component
from titan_core.api.plugins.errors import Problem
from titan_core.api.plugins.job import JobContext
from titan_core.api.plugins.ref import Ref


@dataclass(frozen=True, kw_only=True)
class Observer(Component):
    """An object with lifecycle hooks, built if the job selects it: a debugger, or a destination of metrics."""

    kind = "observer"
    build: Ref[Callable[[JobContext[Any]], object]]
    """Builds the object, before the model. It opens files and connections in ``titan_train_start``, which receives the
    run."""
    active: Callable[[JobContext[Any]], bool]
    """Whether the job selects it. Must be pure and must not import torch."""
    check: Ref[Callable[[JobContext[Any]], Iterable[Problem]]] | None = None
    """Returns the reasons why the job cannot run, before anything is built. Called if active; must not import torch."""
    first_rank: bool = False
    """Whether the object exists on rank 0 only, as one that writes metrics. It may have no tensors in a checkpoint."""
    may_fail: bool = False
    """Whether a run continues without the object after an exception, with a warning. After a full disk and the like, it is
    called again."""
