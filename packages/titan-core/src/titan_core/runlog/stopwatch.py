"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up the seconds that the device spends on each phase of training.

    A CPU is timed by the clock. A GPU works through what it was given later, so it is made to note the time itself, and
    nothing waits for it until the figures are taken.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._pending: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str, on_host: bool = False) -> Iterator[None]:
        """Count what is done inside for phase ``name``; ``on_host``: by the clock in any case, as the host does the work."""
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
        """Seconds by phase since they were last taken. Waits until the device is done with them."""
        for name, begun, ended in self._pending:
            ended.synchronize()
            self._seconds[name] += begun.elapsed_time(ended) / 1000
        seconds, self._seconds = self._seconds, defaultdict(float)
        self._pending.clear()
        return dict(seconds)
