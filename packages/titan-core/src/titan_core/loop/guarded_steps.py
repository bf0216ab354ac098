"""Optimizer steps that an observer may skip."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from titan_core.api import SkipsOnDevice
from titan_core.api.observe.host_copy import HostCopy


class GuardedSteps:
    """Takes the steps of an optimizer. If the device decides whether to skip one, the host learns that one step later."""

    def __init__(self, optimizer: Optimizer, on_host: bool) -> None:
        """
        Args:
            on_host: whether the optimizer works on the host although the flags are on a device.
        """
        self._optimizer = optimizer
        self._conditional = optimizer if isinstance(optimizer, SkipsOnDevice) and not on_host else None
        self._skipped: bool | HostCopy = False  # in flight: whether the last step was taken, which is usually true

    def decidable(self, skip: bool | Tensor) -> bool | Tensor:
        """Return ``skip``. If it is a tensor and the optimizer cannot decide on the device, wait for its value."""
        if self._conditional is not None or isinstance(skip, bool):
            return skip
        return not bool(~skip)  # read as what it usually is: a simulated device answers with true

    def take(self, skip: bool | Tensor) -> None:
        """Take a step unless ``skip``, as :meth:`decidable` returned it, is true."""
        if isinstance(skip, torch.Tensor):
            assert self._conditional is not None
            self._conditional.step_unless(skip)
            self._skipped = HostCopy([~skip])
            return
        if not skip:
            self._optimizer.step()
        self._skipped = skip

    def last_skipped(self) -> bool:
        """Whether the last step was skipped. Call it when the device has the work of the next one, so that it does not idle
        while the host waits for the last."""
        return not self._skipped.wait()[0] if isinstance(self._skipped, HostCopy) else self._skipped
