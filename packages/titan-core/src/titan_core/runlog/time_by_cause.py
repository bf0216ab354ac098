"""Accounts for this rank's time: every second, by cause; and the phases of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from titan_core.toolkit.launching import Began

CAUSES = ("start", "compile", "steps", "data", "save", "evaluation")
"""``start`` lasts until the first step; ``compile`` is the first step of a job that compiles; ``data``, ``save`` and
``evaluation`` are what the host waits for between and within steps."""

_SHARE = 0.01
_MOST_SECONDS = 60.0
_LEAST_SHARE = 0.001


class SpentTime:
    """Seconds by cause since the attempt began. One cause is current at any time, so they sum to the time that has passed.

    The clock is the host's. Changing the cause takes less than a microsecond, and does not wait for a device.
    """

    def __init__(self, began: Began | None = None) -> None:
        """
        Args:
            began: when the attempt did (default: now).
        """
        self._seconds = dict.fromkeys(CAUSES, 0.0)
        self._cause = "start"
        self._data_before = 0.0
        self._told = 0.0
        self.begin(began or Began(*2 * (time.time(),)))

    def begin(self, began: Began) -> None:
        """Set when the attempt began; the cause must still be ``start``."""
        self.began = began
        self._since = time.perf_counter() - max(0.0, time.time() - began.attempt)

    def change(self, cause: str) -> str:
        """Spend the time on ``cause`` from now on; return the cause before."""
        now = time.perf_counter()
        self._seconds[self._cause] += now - self._since
        self._since = now
        before, self._cause = self._cause, cause
        return before

    @contextmanager
    def on(self, cause: str) -> Iterator[None]:
        """Spend the time of the body on ``cause``. Bodies may be nested; the inner one counts."""
        before = self.change(cause)
        try:
            yield
        finally:
            self.change(before)

    def totals(self) -> dict[str, float]:
        """Return the seconds by cause until now."""
        self.change(self._cause)
        return dict(self._seconds)

    def elapsed(self) -> float:
        """Return the seconds since the attempt began."""
        return sum(self.totals().values())

    def limit_data(self, most: float) -> None:
        """Count as steps what exceeds ``most`` seconds of waits for data since the last call: the device computed then."""
        self.change(self._cause)
        excess = self._seconds["data"] - self._data_before - most
        if excess > 0:
            self._seconds["data"] -= excess
            self._seconds["steps"] += excess
        self._data_before = self._seconds["data"]

    def is_due(self, elapsed: float) -> bool:
        """Whether the totals should be logged: if 1 % of the attempt's time has passed since they were, or a minute, but not
        more often than every 0.1 %. The number of these events grows with the logarithm of the time, and what a kill leaves
        unlogged is a small part of it.

        Args:
            elapsed: seconds since the attempt began, the same on all ranks.
        """
        least = max(min(_SHARE * elapsed, _MOST_SECONDS), _LEAST_SHARE * elapsed)
        if elapsed - self._told < least:
            return False
        self._told = elapsed
        return True


class Stopwatch:
    """Sums the seconds that the device spends on each phase of training.

    A CPU is timed by the clock. A GPU runs asynchronously, so CUDA events record the times, and nothing waits for the GPU
    until the figures are taken.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._pending: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self, name: str, on_host: bool = False) -> Iterator[None]:
        """Count the time of the body towards phase ``name``. With ``on_host``, the clock is used even for a GPU."""
        if self._on_cuda and not on_host:
            begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begun.record()
            yield
            ended.record()
            self._pending.append((name, begun, ended))
            return
        started = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """Return the seconds by phase since the last call. Waits until the device has finished these phases."""
        for name, begun, ended in self._pending:
            ended.synchronize()
            self._seconds[name] += begun.elapsed_time(ended) / 1000
        seconds, self._seconds = self._seconds, defaultdict(float)
        self._pending.clear()
        return dict(seconds)
