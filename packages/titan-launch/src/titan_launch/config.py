"""Keys of ``[training]`` that concern a rank's process. Names follow TorchTitan's TOML."""

from __future__ import annotations

from typing import ClassVar

from titan_core.api import ALL_KEYS, NonNegativeInt, Section


class GarbageKeys(Section):
    section: ClassVar[str] = "training"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    gc_freq: NonNegativeInt = 50
    """Number of steps between collections of Python's garbage, which all ranks do at the same step. 0 leaves them to Python:
    ranks then often wait for one that collects."""


NUMA_BINDING = "TITAN_NUMA_BINDING"
"""Environment variable of ranks: ``--numa-binding``."""
NUMA_BINDINGS = ("auto", "node", "off")
