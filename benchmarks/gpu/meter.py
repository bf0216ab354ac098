"""The measurements of one configuration, the same for every kind of loop."""

from __future__ import annotations

import resource
import statistics
import time
from dataclasses import dataclass, field

import torch

from titan_core.toolkit.device import synchronize


@dataclass
class Measurement:
    """What a process reports. Times are in seconds."""

    tokens_per_second: float
    step_seconds: float
    """Mean over the measured steps, which follow each other without waiting for the device."""
    host_seconds: float
    """Time until the call of a step returns, with an idle device before it: the median of the probes. The host keeps the
    device busy as long as this is less than :attr:`step_seconds`."""
    first_step_seconds: float
    """From the start of the process to the end of the first step, with imports, building and compilation."""
    peak_gib: float
    """Most device memory allocated; on a CPU, most memory of the process."""
    reserved_gib: float | None
    mfu: float | None
    """Share of the bf16 peak of the data sheet; ``None`` for a device without one."""
    losses: list[float] = field(default_factory=list)
    """The first and the last."""


class Meter:
    """Takes the times of a run, step by step, counted from 1."""

    def __init__(self, device: torch.device, started: float, warmup: int, steps: int, probes: int) -> None:
        """
        Args:
            started: when the process was started, in seconds since the epoch.
        """
        self._device, self._started = device, started
        self._first = warmup + 1
        self._last = warmup + steps
        self._probes = range(self._last + 1, self._last + 1 + probes)
        self._steps = steps
        self._begun = self._probe_begun = 0.0
        self._host: list[float] = []
        self.first_step = self._seconds = 0.0

    def begin(self, step: int) -> None:
        """Note that the host begins a step."""
        if step == self._first:
            synchronize(self._device)
            self._begun = time.perf_counter()
        if step in self._probes:
            synchronize(self._device)
            self._probe_begun = time.perf_counter()

    def end(self, step: int) -> None:
        """Note that the host has called everything of a step."""
        now = time.perf_counter()
        if step in self._probes:
            self._host.append(now - self._probe_begun)
        if step == 1:
            synchronize(self._device)
            self.first_step = time.time() - self._started
        if step == self._last:
            synchronize(self._device)
            self._seconds = (time.perf_counter() - self._begun) / self._steps

    def result(self, tokens_per_step: int, flops_per_token: float, peak_flops: float | None) -> Measurement:
        """Return the measurement, after the last step."""
        speed = tokens_per_step / self._seconds
        on_cuda = self._device.type == "cuda"
        if on_cuda:
            peak = torch.cuda.max_memory_allocated(self._device) / 2**30
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux
        return Measurement(
            tokens_per_second=speed,
            step_seconds=self._seconds,
            host_seconds=statistics.median(self._host),
            first_step_seconds=self.first_step,
            peak_gib=peak,
            reserved_gib=torch.cuda.max_memory_reserved(self._device) / 2**30 if on_cuda else None,
            mfu=None if peak_flops is None else speed * flops_per_token / peak_flops,
        )
