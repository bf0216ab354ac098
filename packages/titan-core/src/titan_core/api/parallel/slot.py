"""Slots, in which one plugin leaves values for another. Plugins do not import each other: the reader declares a slot, and
the writer fills it by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from titan_core.api.plugins.ref import Ref

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Slot(Generic[T]):
    """A named place for values of type ``T``, one per module. Its reader declares it in :attr:`Component.reads`."""

    name: str
    """``"titan_parallel.region_casts"``: the package of the reader, and a subject."""
    summary: str
    """What a value is, in one line."""
    accepts: Ref[Callable[[object], T]] | None = None
    """Value -> the value to keep. Raises :class:`TypeError` with what it must be. Called once, when a transform has filled
    the slot; the error names that transform. ``None``: any value."""
