"""Python's garbage collector, which belongs to the process and not to one job. Free of torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NESTED = 4
"""The most collections of a job, in case finalizers leave garbage again and again."""


@contextmanager
def gc_as_before() -> Iterator[None]:
    """Undo, however the block ends, what it did to the collector: nothing that it froze stays frozen.

    Python can only unfreeze everything. Objects that were frozen before stay so if the block froze none.
    """
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    try:
        yield
    finally:
        # Counting takes 0.1 s per million frozen objects; unfreezing takes no time, also where nothing is frozen.
        if not frozen or gc.get_freeze_count() > frozen:
            gc.unfreeze()
        (gc.enable if enabled else gc.disable)()


def free_job() -> None:
    """Free a job that is over, with its process groups: the threads of a group that is alive when Python exits may abort the
    process.

    A model is cyclic garbage, and so is a mesh with a flattened view. The collector does not see every reference from the
    first to the second, so that a collection which frees the model leaves the mesh to the next one.
    """
    for _ in range(_NESTED):
        if not gc.collect():
            return
