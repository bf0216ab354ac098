"""Metric loggers, and the values that they receive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from titan_core.api.build_context import JobContext, S
from titan_core.api.components import Component
from titan_core.api.errors import Problem
from titan_core.api.ref import Ref

if TYPE_CHECKING:
    from titan_core.api.events import RunStart

Record = Mapping[str, float | int | None]
"""``step`` and metrics by name, for one logged step or one validation (which has ``validation_loss`` but no ``loss``).
``None``: the value is unknown or not finite."""


@dataclass(frozen=True)
class LoggerContext(JobContext[S]):
    """The context with which a metric logger is built. Loggers exist on rank 0 only."""

    run: RunStart
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


def is_estimated(records: Iterable[Mapping[str, object]]) -> bool:
    """Whether any record has an MFU relative to a measured peak rather than the peak of a data sheet."""
    return any(record.get("mfu_estimated") for record in records)


def format_mfu(mfu: float, estimated: bool) -> str:
    """Return a percentage, with a tilde if it is an estimate. Values above 100 % are marked as having too low a peak."""
    text = f"{'~' if estimated else ''}{mfu:.1%}"
    return f"{text} (peak too low)" if mfu > 1.0 else text
