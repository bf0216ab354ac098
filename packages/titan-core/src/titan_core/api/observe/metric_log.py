"""Metric loggers, and the values that they receive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from titan_core.api.plugins.component import Component
from titan_core.api.plugins.contexts import JobContext, S
from titan_core.api.plugins.errors import Problem
from titan_core.api.plugins.ref import Ref

if TYPE_CHECKING:
    from titan_core.api.observe.events import Run

Record = Mapping[str, float | int | None]
"""``step`` and metrics by name, for one logged step or one validation (which has ``validation_loss`` but no ``loss``).
``None``: the value is unknown or not finite."""


@dataclass(frozen=True)
class LoggerContext(JobContext[S]):
    """The context with which a metric logger is built. Loggers exist on rank 0 only."""

    run: Run
    """The run; its directory is ``run.dump_folder``."""
    device_name: str


class MetricLog(Protocol):
    """A destination of metrics. It may also have lifecycle hooks, which are called from the first step on."""

    def log(self, record: Record) -> None:
        """Log the metrics of a step."""

    def close(self) -> None:
        """Write pending metrics and release resources."""


@dataclass(frozen=True, kw_only=True)
class MetricLogger(Component):
    """A destination of metrics."""

    kind = "metric logger"
    build: Ref[Callable[[LoggerContext[Any]], MetricLog]]
    active: Callable[[JobContext[Any]], bool]
    check: Ref[Callable[[JobContext[Any]], Iterable[Problem]]] | None = None
    """Returns the reasons why the job cannot run (such as a missing library). Called if active; must not import torch."""
