"""Models that jobs of earlier tests have left in this process."""

from __future__ import annotations

import gc
import os

_TASKS = "/proc/self/task"  # Linux's; elsewhere nothing is collected early
_THREADS = 40


def release_models() -> None:
    """Collect the models that jobs have left, once many threads are theirs.

    A model is cyclic garbage and holds process groups. Each of them has two threads, one of which wakes up a hundred times
    a second: with 100 groups in each process of a run, half of the processors' time is spent on that. A collection takes
    0.25 s, and Python starts none by itself for long: :class:`~harness.jobs.Recorder` freezes what it would walk.
    """
    if os.path.isdir(_TASKS) and len(os.listdir(_TASKS)) > _THREADS:
        gc.collect()
