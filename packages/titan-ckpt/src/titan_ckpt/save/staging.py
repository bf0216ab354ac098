"""Copies of tensors in host memory, from which a background save writes while training changes the originals.

On CUDA, copies run on a stream of their own. They start when the training stream has computed the values, and the device
makes the next update wait for them. Only the thread that writes waits on the host, and only for the copies.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_ckpt.torch_private import with_local_tensor


class Staging:
    """Host memory that is reused for each checkpoint. (``DefaultStager`` of torch 2.11 cannot copy a DTensor.)"""

    def __init__(self, device: torch.device, pinned: bool, cuda: Any = torch.cuda) -> None:
        """
        Args:
            pinned: whether to copy to pinned memory, so that a copy on CUDA does not block the thread that requests it.
            cuda: ``torch.cuda``, or a stand-in.
        """
        self._device, self._pinned, self._cuda = device, pinned, cuda
        self._stream = cuda.Stream(device) if device.type == "cuda" else None
        self._copies: dict[str, Tensor] = {}

    def snapshot(self, tensors: Mapping[str, Tensor]) -> Snapshot:
        """Return a snapshot of ``tensors`` as they are now, after all work that this thread has requested."""
        return Snapshot(self, tensors, self._record())

    def copy(self, tensors: Mapping[str, Tensor], after: Any) -> tuple[dict[str, Tensor], Any]:
        """Request copies of ``tensors``. The copies are valid until the next call.

        Args:
            after: the CUDA event to start after, or ``None``.

        Returns:
            The copies, and the CUDA event that completes them, if any.
        """
        if self._stream is None:
            return {name: self._copy(name, tensor) for name, tensor in tensors.items()}, None
        self._cuda.set_device(self._device)  # the current device is per thread, and this may not be the training thread
        self._stream.wait_event(after)
        with self._cuda.stream(self._stream):
            copies = {name: self._copy(name, tensor) for name, tensor in tensors.items()}
            return copies, self._record()

    def make_stream_wait(self, event: Any) -> None:
        """Make further work that this thread requests wait for ``event``, on the device."""
        self._cuda.current_stream(self._device).wait_event(event)

    def _record(self) -> Any:
        """Return an event of the current stream, or ``None``."""
        return None if self._stream is None else self._cuda.current_stream(self._device).record_event()

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        copy = self._copies.get(name)
        if copy is None or copy.shape != local.shape or copy.dtype != local.dtype:
            copy = torch.empty_like(local, device="cpu", memory_format=torch.contiguous_format, pin_memory=self._pinned)
            self._copies[name] = copy
        copy.copy_(local, non_blocking=self._pinned)
        return with_local_tensor(tensor, copy) if isinstance(tensor, DTensor) else copy


class Snapshot:
    """Tensors at one moment. They must not change until :meth:`before_update` has been called."""

    def __init__(self, staging: Staging, tensors: Mapping[str, Tensor], ready: Any) -> None:
        self._staging, self._ready = staging, ready
        self._tensors = tensors  # kept until they are copied, because the copies run on another stream than their allocation
        self._requested = threading.Event()
        self._copied: Any = None

    def copy(self) -> dict[str, Tensor]:
        """Return copies of the tensors in host memory, complete. For the background thread; waits for the copies only.

        Raises:
            RuntimeError, MemoryError: the host has no memory for them.
        """
        try:
            copies, self._copied = self._staging.copy(self._tensors, self._ready)
        finally:
            self._requested.set()
        if self._copied is not None:
            self._copied.synchronize()
        self._tensors = {}
        return copies

    def before_update(self) -> None:
        """Make the update that follows wait for the copies. For the training thread.

        Waits until the copies have been requested. Without pinned memory they are then complete; with pinned memory, the
        device waits for them and the host does not.
        """
        self._requested.wait()
        if self._copied is not None:
            self._staging.make_stream_wait(self._copied)
