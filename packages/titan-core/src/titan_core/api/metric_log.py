"""What a metric logger is to the core."""

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
"""``step`` and figures by name, of one logged step or of one validation (which has ``validation_loss`` and no ``loss``);
``None`` where a figure is not known or not finite."""


@dataclass(frozen=True)
class LoggerContext(JobContext[S]):
    """What a metric logger is built with. Loggers exist on rank 0 alone."""

    run: RunStart
    """The run, with its directory: ``run.dump_folder``."""
    device_name: str


class MetricLog(Protocol):
    """A place that metrics go to. It may have lifecycle hooks too, from the first step on."""

    def log(self, record: Record) -> None:
        """Take the figures of a step."""
        ...

    def close(self) -> None:
        """Write what is not written yet."""
        ...


@dataclass(frozen=True, kw_only=True)
class MetricLogger(Component):
    """A place that metrics go to."""

    kind = "metric logger"
    build: Ref[Callable[[LoggerContext[Any]], MetricLog]]
    active: Callable[[JobContext[Any]], bool]
    check: Ref[Callable[[JobContext[Any]], Iterable[Problem]]] | None = None
    """What makes the job impossible (a library that is not installed). Free of torch; called when active."""


def is_estimated(records: Iterable[Mapping[str, object]]) -> bool:
    """Whether MFU in some of a run's records is relative to a peak that was measured, and not to a data sheet's."""
    return any(record.get("mfu_estimated") for record in records)


def format_mfu(mfu: float, estimated: bool) -> str:
    """A percentage, with a tilde where it is an estimate. Above 100 % the peak was estimated too low, which is said."""
    text = f"{'~' if estimated else ''}{mfu:.1%}"
    return f"{text} (peak too low)" if mfu > 1.0 else text
