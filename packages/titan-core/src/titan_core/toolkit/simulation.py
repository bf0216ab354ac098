"""Simulation of one rank of a job without its hardware and without the other ranks. Free of torch.

The trainer runs as always. The few places that ask whether it is simulated are listed in docs/architecture/simulation.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from titan_core.api.plugins.assembled_job import AssembledJob

if TYPE_CHECKING:
    from titan_core.api import World


class Simulation(Protocol):
    """What stands in for hardware and other ranks."""

    checks_model: bool
    """Whether to check the model on a small copy, which takes seconds. A job that is simulated often needs that once."""
    computes: bool
    """Whether tensors on its device have values: one real rank, without the others."""

    def join(self, job: AssembledJob) -> AbstractContextManager[World]:
        """Return a context of the rank's world."""


COMPOSED: dict[Any, Callable[..., Any]] = {}
"""Custom operator (``torch.library.custom_op``) -> its implementation, made of other operators. A simulation runs it, so
that what it allocates and communicates counts; of other custom operators it only determines the shapes of the results."""

_current: Simulation | None = None


def current_simulation() -> Simulation | None:
    """Return the simulation that this process runs, if any."""
    return _current


def has_values() -> bool:
    """Whether tensors on the device of this process have values."""
    return _current is None or _current.computes


@contextmanager
def simulating(simulation: Simulation) -> Iterator[None]:
    """Let jobs that are trained in the ``with`` block run in ``simulation``."""
    global _current
    before, _current = _current, simulation
    try:
        yield
    finally:
        _current = before
