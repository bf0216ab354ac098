"""Averages in the memory of the host, of weights on a device.

The device computes them, piece by piece, as it would those in its own memory, so that the values are the same. On CUDA this
is work of a stream beside training's: it starts when the update has been computed, and only the next update waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

ELEMENTS = 2**24
"""How many elements of an average are on the device at a time: 64 MiB in fp32."""


class HostAverages:
    """Takes weights into averages on the host. All methods are called in the thread that trains."""

    def __init__(self, device: torch.device) -> None:
        """
        Args:
            device: where the weights are.
        """
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._done: Any = None
        self._used: list[Tensor] = []

    def zeros_like(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return zeros on the host, pinned for CUDA, with the shape and the shards of ``tensor``."""
        return torch.zeros_like(
            tensor, dtype=dtype, device="cpu", pin_memory=self._pinned, memory_format=torch.contiguous_format
        )

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of ``tensor`` on the host, complete once the device has done what was issued before."""
        copy = torch.empty_like(tensor, device="cpu", pin_memory=self._pinned)
        return copy.copy_(tensor, non_blocking=self._pinned)

    def take(self, pairs: Iterable[tuple[Tensor, Tensor]], weight: Tensor) -> None:
        """Move each average towards the newest value, by ``weight``, a 0-d tensor on the device.

        Args:
            pairs: average on the host, newest value on the device. The values must not change before :meth:`before_change`.
        """
        pairs = list(pairs)
        # They were allocated for the current stream, which must not use their memory again while the other one reads.
        self._used = [weight, *(newest for _, newest in pairs)]
        if self._stream is None:
            self._take(pairs, weight)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._take(pairs, weight)
            self._done = self._stream.record_event()

    def before_change(self) -> None:
        """Make what the device is going to do wait until the averages are taken. The host does not wait."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
        self._used = []

    def finish(self) -> None:
        """Wait until the averages on the host are complete."""
        if self._done is not None:
            self._done.synchronize()

    @property
    def _pinned(self) -> bool:
        return self._device.type == "cuda"

    def _take(self, pairs: list[tuple[Tensor, Tensor]], weight: Tensor) -> None:
        for average, newest in pairs:
            by = weight.to(average.dtype)
            for kept, piece in zip(average.view(-1).split(ELEMENTS), newest.reshape(-1).split(ELEMENTS), strict=True):
                moved = kept.to(self._device, non_blocking=True, copy=True)
                moved.lerp_(piece.to(average.dtype), by)
                kept.copy_(moved, non_blocking=self._pinned)
