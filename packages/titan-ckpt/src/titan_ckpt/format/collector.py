"""Python's garbage collector during work that creates many objects and no garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Keep Python's own collections off. Plans and manifests of many ranks are millions of objects, and each collection
    visits all of them.

    For the main thread alone: the switch is the process's, and a thread would set it at a moment that suits nobody else.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
