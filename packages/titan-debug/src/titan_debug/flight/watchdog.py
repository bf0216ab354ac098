"""A thread that notices steps which take too long, and other ranks' requests for a dump."""

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
"""How often it looks, at most."""

PATIENCE_SECONDS = 30.0
"""How long the end of a run waits for a dump to be written."""


class Watchdog:
    """Watches one rank. Steps are watched, from loading their batch to their update. A validation or a checkpoint may take
    as long as it does, and the ranks that wait for it in their next step notice.

    Python lets one thread run at a time, so a thread that is stuck in an extension without giving that up stops this one
    too. For this case it keeps a timer of ``faulthandler``'s running, which needs no such permission, and winds it up again
    each time it looks.
    """

    def __init__(
        self,
        requests: Requests,
        first_seconds: float,
        seconds: float,
        late: Callable[[int, float], None],
        asked: Callable[[Request], None],
    ) -> None:
        """Both callbacks are called in the watchdog's thread.

        Args:
            first_seconds: how long the first step may take.
            seconds: how long another one may take.
            late: takes a step that has taken longer, and that limit; once a step.
            asked: takes a request.
        """
        self._requests, self._late, self._asked = requests, late, asked
        self._limit, self._later_limit = first_seconds, seconds
        self._poll = min(POLL_SECONDS, min(first_seconds, seconds) / 4)
        self._step: tuple[int, float] | None = None  # the current step, and since when
        self._told: tuple[int, float] | None = None
        self._problem = ""  # the last one, which is logged once
        self._looked = time.monotonic()
        self._stacks: TextIO | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="titan-watchdog", daemon=True)

    def start(self, stacks: TextIO | None) -> None:
        """Begin.

        Args:
            stacks: where the threads' stacks are written when Python itself is stuck.
        """
        self._stacks = stacks
        self._looked = time.monotonic()
        self._thread.start()

    @property
    def starved(self) -> bool:
        """Whether it could not look for too long."""
        return time.monotonic() - self._looked > self._later_limit + self._poll

    def step_begins(self, step: int) -> None:
        """Watch ``step`` from now on."""
        self._step = (step, time.monotonic())

    def step_ends(self) -> None:
        """Watch nothing."""
        self._step = None
        self._limit = self._later_limit

    def step_cancelled(self) -> None:
        """Watch nothing; the step was not taken."""
        self._step = None

    def stop(self) -> None:
        """End the thread. It may be in the midst of a dump, which is waited for, but not forever."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(PATIENCE_SECONDS)

    def pause(self) -> None:
        """Wait for as long as others need to see a request; for the callbacks."""
        self._ended.wait(2 * self._poll)

    def _run(self) -> None:
        while True:
            self._guarded(self._wind_up)
            if self._ended.wait(self._poll):
                break
            self._guarded(self._look)
            self._looked = time.monotonic()
        faulthandler.cancel_dump_traceback_later()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as problem:  # a plugin's hook, torch's private functions: the next hang is to be reported too
            if repr(problem) != self._problem:
                log.exception("an error in the watchdog; it continues")
            self._problem = repr(problem)

    def _wind_up(self) -> None:
        if self._stacks is not None:
            seconds = max(LEAST_WATCHED_SECONDS, self._later_limit) + self._poll
            faulthandler.dump_traceback_later(seconds, file=self._stacks)

    def _look(self) -> None:
        step, limit = self._step, self._limit
        if step is not None and step != self._told and time.monotonic() - step[1] > limit:
            self._told = step
            self._late(step[0], limit)
        request = self._requests.new()
        if request is not None:
            self._asked(request)
