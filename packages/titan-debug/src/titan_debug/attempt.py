"""Telling the files of one attempt at a run from those of the attempts before it."""

from __future__ import annotations

import time
import weakref

from titan_core.train.events import RunStart

_begun: list[tuple[weakref.ref[RunStart], float]] = []
"""The last attempt that was asked for: observers of one run must agree on it."""


def begin_attempt(run: RunStart) -> float:
    """When rank 0 began, in seconds since the epoch; the same on all ranks, which have to call it alike."""
    if not _begun or _begun[0][0]() is not run:
        _begun[:] = [(weakref.ref(run), run.world.on_first_rank(time.time))]
    return _begun[0][1]
