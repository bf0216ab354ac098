"""Repeated timings: the median and the spread of several rounds."""

from __future__ import annotations

import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from titan_core.api import UserError

ROUNDS = 7
LEAST_SECONDS = 0.02
"""Duration of a round, in which a quick function is called many times."""


@dataclass(frozen=True)
class Timing:
    """The duration of a call."""

    seconds: float
    """Median over the rounds."""
    spread: float
    """Interquartile range of the rounds, divided by the median."""

    @classmethod
    def of(cls, rounds: Iterable[float], what: str) -> Timing:
        """Return the timing of ``rounds``, each in seconds per call.

        Raises:
            UserError: a round took no time, or no finite one.
        """
        seconds = sorted(rounds)
        if len(seconds) < 2 or not all(math.isfinite(one) and one > 0 for one in seconds):
            shown = ", ".join(f"{one:g}" for one in seconds)
            raise UserError.one(
                f"calibration of {what}",
                f"the clock measured {shown or 'no'} seconds",
                "repeat it; report this if it persists",
            )
        low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(middle, (high - low) / middle)


class Timer(ABC):
    """Measures calls on a device. Subclasses know when the device has finished."""

    def __init__(self, rounds: int = ROUNDS, least_seconds: float = LEAST_SECONDS) -> None:
        self.rounds, self.least_seconds = rounds, least_seconds

    def __call__(self, function: Callable[[], object], what: str) -> Timing:
        """Return the duration of ``function``.

        Raises:
            UserError: the clock shows no plausible time.
        """
        function()  # loads kernels, fills caches
        once = self.spent(function, 2)
        calls = max(1, min(10_000, math.ceil(self.least_seconds / max(once, 1e-7))))
        return Timing.of((self.spent(function, calls) for _ in range(self.rounds)), what)

    @abstractmethod
    def spent(self, function: Callable[[], object], calls: int) -> float:
        """Return the mean seconds of ``calls`` calls."""


class HostTimer(Timer):
    """Measures what the host computes."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, rounds: int = ROUNDS, least_seconds: float = LEAST_SECONDS
    ) -> None:
        """
        Args:
            clock: returns seconds. ``time.thread_time`` ignores other load on the machine, and other threads.
        """
        super().__init__(rounds, least_seconds)
        self._clock = clock

    def spent(self, function: Callable[[], object], calls: int) -> float:
        """See :meth:`Timer.spent`."""
        began = self._clock()
        for _ in range(calls):
            function()
        return (self._clock() - began) / calls


class CudaTimer(Timer):
    """Measures a GPU, by events in its stream, while the host is ahead of it."""

    def __init__(self, device: torch.device, rounds: int = ROUNDS, least_seconds: float = LEAST_SECONDS) -> None:
        super().__init__(rounds, least_seconds)
        self._device = device
        size = 8192
        self._ahead = torch.zeros(size, size, dtype=torch.bfloat16, device=device)

    def spent(self, function: Callable[[], object], calls: int) -> float:
        """See :meth:`Timer.spent`."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self._device)
        for _ in range(4):  # some ms of work, in which the host issues the calls
            torch.mm(self._ahead, self._ahead)
        start.record()
        for _ in range(calls):
            function()
        end.record()
        torch.cuda.synchronize(self._device)
        return start.elapsed_time(end) / 1000 / calls
