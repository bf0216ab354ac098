"""Checks of a machine and its installation, which ``titan doctor`` runs. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from titan_core.api.commands.registry import Registry
from titan_core.api.plugins.component import Component
from titan_core.api.plugins.ref import Ref


class Health(StrEnum):
    """How much a result matters."""

    OK = "ok"
    """Works."""
    NOTE = "note"
    """Worth knowing, and harmless for most jobs."""
    WARNING = "warning"
    """Some jobs fail, or run slowly."""
    ERROR = "error"
    """Jobs that need the subject cannot run."""


@dataclass(frozen=True)
class CheckResult:
    """One line of the report."""

    subject: str
    """The thing that was checked, in a few words: ``"shared memory"``."""
    health: Health
    """How much the result matters."""
    detail: str
    """What was found and, unless it is fine, what does not work because of it."""
    fix: str = ""
    """What to do. Every warning and error has one."""


@dataclass(frozen=True)
class HealthContext:
    """The argument of :attr:`HealthCheck.check`."""

    registry: Registry
    """All installed components."""
    folder: Path
    """Folder in which runs are written; it need not exist yet."""
    endpoint: str
    """Address at which the machines of a job meet (HOST:PORT); empty unless the user passed one."""


@dataclass(frozen=True, kw_only=True)
class HealthCheck(Component):
    """A group of results about one part of the machine or of the installation."""

    kind = "health check"
    check: Ref[Callable[[HealthContext], Iterable[CheckResult]]]
    """Returns the results. Must not import torch, use the network or take longer than some 50 ms, unless ``slow``."""
    slow: bool = False
    """Whether the check runs only with ``titan doctor --full``."""
