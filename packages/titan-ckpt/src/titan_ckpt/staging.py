"""Copies of tensors in host memory, from which a background save writes while training changes the originals."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_ckpt.torch_private import with_local_tensor


class Staging:
    """Copies tensors to host memory that is reused for each checkpoint. (``DefaultStager`` of torch 2.11 cannot copy a
    DTensor.)"""

    def __init__(self, device: torch.device, pinned: bool) -> None:
        self._device, self._pinned = device, pinned
        self._copies: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy ``tensors``. The copies are valid until the next call."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the current device is per thread, and this may not be the training thread
        staged = {name: self._copy(name, tensor) for name, tensor in tensors.items()}
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return staged

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        copy = self._copies.get(name)
        if copy is None or copy.shape != local.shape or copy.dtype != local.dtype:
            copy = torch.empty_like(local, device="cpu", memory_format=torch.contiguous_format, pin_memory=self._pinned)
            self._copies[name] = copy
        copy.copy_(local, non_blocking=self._pinned)
        return with_local_tensor(tensor, copy) if isinstance(tensor, DTensor) else copy
