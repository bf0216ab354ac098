"""Python's garbage collector, which belongs to the process and not to one job. Free of torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_as_before() -> Iterator[None]:
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
