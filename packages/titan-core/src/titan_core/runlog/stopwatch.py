"""Measurement of the phases of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
