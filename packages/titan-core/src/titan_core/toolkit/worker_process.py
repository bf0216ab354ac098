"""Worker processes. Free of torch."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait

from titan_core.api import UserError
from titan_core.toolkit.plugin_files import load_plugin_files
from titan_core.toolkit.text import log_to_stderr

ENDED = "it ended unexpectedly (killed, or out of memory?)"


def worker_processes(number: int) -> ProcessPoolExecutor:
    """Return a pool of spawned processes. A fork of a training process would inherit locked locks of its threads, and a GPU
    context that it cannot use."""
    return ProcessPoolExecutor(number, multiprocessing.get_context("spawn"), _begin)


def end_now(pool: ProcessPoolExecutor) -> None:
    """Kill the pool's processes, whatever they are doing."""
    # Public from Python 3.14 on, as ``kill_workers``.
    for process in list((pool._processes or {}).values()):  # noqa: SLF001
        process.kill()
    pool.shutdown(wait=True, cancel_futures=True)


def _begin() -> None:
    """Ignore signals that reach the whole process group, which the parent handles, and end when the parent ends."""
    log_to_stderr()
    logging.getLogger("titan_core").setLevel(logging.INFO)
    stops = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU
    for number in (*stops, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        load_plugin_files()  # before tasks refer to them
    except UserError as error:  # the pool would log a traceback
        logging.error("%s", error)
        os._exit(1)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
