"""A thread that detects slow steps and requests for a dump."""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from collections.abc import Callable
from typing import TextIO

from titan_debug.config import LEAST_WATCHED_SECONDS
from titan_debug.request import Request, Requests

log = logging.getLogger(__name__)

POLL_SECONDS = 2.0
"""Longest interval between two polls."""

PATIENCE_SECONDS = 30.0
"""How long the end of a run waits for a dump in progress."""


class Watchdog:
    """Watches the steps of one rank, from loading the batch to the update. Validation and checkpoints have no time limit; if
    one hangs, the ranks that wait for it in their next step detect it.

    A thread that is stuck in an extension while it holds the GIL stops the watchdog too. For this case the watchdog keeps a
    ``faulthandler`` timer running, which does not need the GIL, and restarts the timer at each poll.
    """

    def __init__(
        self,
        requests: Requests,
        first_seconds: float,
        seconds: float,
        on_late_step: Callable[[int, float], None],
        on_request: Callable[[Request], None],
    ) -> None:
        """
        Args:
            requests: source of requests.
            first_seconds: time limit of the first step.
            seconds: time limit of every other step.
            on_late_step: called in the watchdog's thread with a step that exceeds its limit, and the limit; once per step.
            on_request: called in the watchdog's thread with a request.
        """
        self._requests, self._on_late_step, self._on_request = requests, on_late_step, on_request
        self._limit, self._later_limit = first_seconds, seconds
        self._poll = min(POLL_SECONDS, min(first_seconds, seconds) / 4)
        self._step: tuple[int, float] | None = None  # the current step and its start
        self._reported: tuple[int, float] | None = None
        self._problem = ""  # the latest error; a repetition is not logged
        self._stacks: TextIO | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="titan-watchdog", daemon=True)

    def start(self, stacks: TextIO | None) -> None:
        """Start the thread.

        Args:
            stacks: receives the threads' stacks if Python itself is stuck.
        """
        self._stacks = stacks
        self._thread.start()

    def step_begins(self, step: int) -> None:
        """Start watching ``step``."""
        self._step = (step, time.monotonic())

    def step_ends(self) -> None:
        """Stop watching the step."""
        self._step = None
        self._limit = self._later_limit

    def step_cancelled(self) -> None:
        """Stop watching a step that was not taken. It does not count as the first step."""
        self._step = None

    def stop(self) -> None:
        """Stop the thread. Waits up to ``PATIENCE_SECONDS`` for a dump in progress."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(PATIENCE_SECONDS)

    def pause(self) -> None:
        """Wait until the other ranks have had time to see a request. For use in the callbacks."""
        self._ended.wait(2 * self._poll)

    def _run(self) -> None:
        while True:
            self._guarded(self._restart_timer)
            if self._ended.wait(self._poll):
                break
            self._guarded(self._check)
            faulthandler.cancel_dump_traceback_later()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as problem:  # from a plugin's hook or torch's private API; the next hang must still be reported
            if repr(problem) != self._problem:
                log.exception("error in the watchdog, which continues")
            self._problem = repr(problem)

    def _restart_timer(self) -> None:
        if self._stacks is not None:
            seconds = max(LEAST_WATCHED_SECONDS, self._later_limit) + self._poll
            faulthandler.dump_traceback_later(seconds, file=self._stacks)

    def _check(self) -> None:
        step, limit = self._step, self._limit
        if step is not None and step != self._reported and time.monotonic() - step[1] > limit:
            self._reported = step
            self._on_late_step(step[0], limit)
        request = self._requests.new()
        if request is not None:
            self._on_request(request)
