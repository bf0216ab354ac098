"""Models that jobs of earlier tests have left in this process."""

from __future__ import annotations

import gc
import os

_THREADS = 40


def release_models() -> None:
    """Collect the models that jobs have left, once many threads are theirs.

    A model is cyclic garbage and holds process groups. Each of them has two threads, one of which wakes up a hundred times
    a second: with 100 groups in each process of a run, half of the processors' time is spent on that. A collection takes
    0.25 s, and Python starts none by itself for long, because jobs freeze most objects.
    """
    if len(os.listdir("/proc/self/task")) > _THREADS:
        gc.collect()
