"""Memory of the host for tensors of a device, and copies there and back beside the computation.

On CUDA, copies run on a stream of their own, from and to pinned memory, and the host waits for none. Memory of the device is
freed at fixed points of the program, where the device waits for the copies from it, not when these happen to have ended: how
much is in use does not depend on how far the host is ahead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


class HostMemory:
    """Copies bytes between a device and buffers on the host, which are used again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._arriving: tuple[Any, list[Tensor]] | None = None

    def take(self, like: Tensor) -> Tensor:
        """Return a buffer for the bytes ``like``. Its size is a power of two, as torch allocates pinned memory in any case:
        sizes that vary from step to step use the same buffers."""
        size = 1 << (like.numel() - 1).bit_length()
        if self._free[size]:
            return self._free[size].pop()
        return like.new_empty(size, device="cpu", pin_memory=self._stream is not None)

    def give_back(self, buffer: Tensor) -> None:
        """Take back a buffer. It may still be copied: what its next user copies follows on the same stream."""
        self._free[buffer.numel()].append(buffer)

    def send(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Any:
        """Copy the second of each pair, on the device, into the first. The sources must live, unchanged, until
        :meth:`wait_for` has been called with the result."""
        return self._copy(pairs)

    def fetch(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy the second of each pair into the first, on the device, which :meth:`arrive` completes."""
        self.arrive()
        # Held until then: if backward ended early, their memory would serve the computation while the copies write into it.
        self._arriving = self._copy(pairs), [target for target, _ in pairs]

    def arrive(self) -> None:
        """Make what the device computes from now on wait for the last fetch."""
        if self._arriving is not None:
            self.wait_for(self._arriving[0])
            self._arriving = None

    def wait_for(self, event: Any) -> None:
        """Make what the device computes from now on wait for ``event``, if there is one."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Any:
        """Copy after all that has been issued until now. Return the event that ends it, ``None`` on a CPU."""
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return self._stream.record_event()


class Stored:
    """Bytes in host memory, as long as the object lives."""

    def __init__(self, host: HostMemory, source: Tensor) -> None:
        """
        Args:
            source: the bytes, on the device, to be copied to :attr:`on_host`.
        """
        self._host, self._size = host, source.numel()
        self._buffer = host.take(source)
        self.on_device: Tensor | None = None
        """Where they are fetched to."""

    def __del__(self) -> None:
        self._host.give_back(self._buffer)

    @property
    def on_host(self) -> Tensor:
        """The bytes."""
        return self._buffer[: self._size]

    def fetched(self) -> tuple[Tensor, Tensor]:
        """Return new memory on the device, and the bytes to copy into it."""
        # Allocated on the stream that computes, which uses it, so that no other stream has memory of its own.
        self.on_device = torch.empty(self._size, dtype=torch.uint8, device=self._host.device)
        return self.on_device, self.on_host
