"""Copies of tensors to the host that do not wait for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class HostCopy:
    """Asynchronous copies of tensors to the host. The copies start on construction; :meth:`wait` does not wait for work that
    is queued on the device afterwards."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        # GPU tensors are copied to pinned memory; CPU tensors are not copied.
        self._tensors = [tensor.detach().to("cpu", non_blocking=True) for tensor in tensors]
        self._done = torch.cuda.Event() if any(tensor.is_cuda for tensor in tensors) else None
        if self._done is not None:
            self._done.record()

    def wait(self) -> list[torch.Tensor]:
        """Return the tensors on the host, once the copies are complete."""
        if self._done is not None:
            self._done.synchronize()
        return self._tensors
