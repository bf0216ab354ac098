"""Private torch API that titan-ckpt uses. Checked with torch 2.11 to 2.15:

* the constructor ``DTensor(local_tensor, spec, requires_grad=...)`` and ``DTensor._spec``;
* ``LRScheduler._last_lr``, and the keys of ``LRScheduler.state_dict()`` that begin with ``_``.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

GROUP_KEYS: Final = ("base_lrs", "_last_lr", "lr_lambdas")
"""Keys of a schedule's ``state_dict`` that hold one value for each parameter group."""
INNER_SCHEDULES: Final = "_schedulers"
"""Key of the ``state_dict`` of ``SequentialLR`` and ``ChainedScheduler`` that holds those of their schedules."""


def with_local_tensor(tensor: DTensor, local: Tensor) -> DTensor:
    """Return a DTensor with the mesh, placements, shape and strides of ``tensor`` and the shard ``local``.

    ``local`` may be on another device than the mesh: ``DTensor.from_local``, the public equivalent, moves it to the mesh's
    device.
    """
    return DTensor(local, tensor._spec, requires_grad=False)


def read_rates_from_groups(scheduler: LRScheduler) -> None:
    """Make ``scheduler.get_last_lr()`` return the rates that the optimizer's parameter groups have now."""
    scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
