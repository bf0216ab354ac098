"""Processes that work for this one. Free of torch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait


def worker_processes(number: int) -> ProcessPoolExecutor:
    """Processes that are started afresh, not forked: a fork of a process that trains has its threads' locks, and the context
    of a GPU that it cannot use."""
    return ProcessPoolExecutor(number, multiprocessing.get_context("spawn"), _end_with_parent)


def _end_with_parent() -> None:
    """A signal to the whole group is for the parent to act on; and however the parent ends, so does the worker."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
