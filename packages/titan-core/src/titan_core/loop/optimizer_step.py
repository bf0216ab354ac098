"""Parts of the optimizer's step: the gradient norm and clipping, for parameters sharded in any way; parameters without a
gradient; steps that an observer skips.

torch's clipping needs all gradients on one mesh. Here each rank sums the squares of its local elements, each divided by the
number of ranks that hold the element, and one all-reduce of a scalar sums over the ranks.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement
from torch.optim import Optimizer

from titan_core.api import Finding, SkipsOnDevice, World
from titan_core.api.observe.deferred_reports import HostCopy
from titan_core.plugins.lifecycle import Lifecycle
from titan_core.toolkit.random_state import same_generators
from titan_core.torch_private import multiply_


@torch.no_grad()
def local_gradients(parameters: Iterable[nn.Parameter]) -> dict[int, list[Tensor]]:
    """Return this rank's local gradients, grouped by the number of shards that the whole gradient is divided into. Gradients
    that are still partial are summed in place."""
    by_pieces: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        gradient: Tensor | None = parameter.grad
        if isinstance(gradient, DTensor):
            if _is_partial(gradient.placements):
                assert isinstance(parameter, DTensor)
                parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
            by_pieces[_pieces(gradient.placements, gradient.device_mesh.shape)].append(gradient.to_local())
        elif gradient is not None:
            by_pieces[1].append(gradient)
    return by_pieces


@lru_cache
def _pieces(placements: tuple[Placement, ...], sizes: tuple[int, ...]) -> int:
    """Return the number of shards of a tensor on a mesh of ``sizes``."""
    # Not ``is_shard``, which is false for the strided shards of TP under FSDP.
    return math.prod(size for placement, size in zip(placements, sizes, strict=True) if not placement.is_replicate())


@lru_cache
def _is_partial(placements: tuple[Placement, ...]) -> bool:
    """Whether ranks hold addends of a tensor. Titan's own parallelisms sum their gradients; layers of a third party, such as
    torch's tensor parallelism, may leave it to the optimizer step."""
    return any(placement.is_partial() for placement in placements)


@torch.no_grad()
def global_norm(gradients: dict[int, list[Tensor]], world: World) -> Tensor:
    """Return the 2-norm over all gradients: an fp32 scalar, equal on all ranks that share a replica of the weights."""
    # Ranks of one pipeline stage. An element of a gradient in n shards is on ``holders / n`` of them.
    stages = math.prod(world.plan.degrees[dim.name] for dim in world.plan.dims if dim.divides == "layers")
    holders = world.size // world.plan.diverging_replicas // stages
    total = torch.zeros((), dtype=torch.float32, device=world.device)
    for pieces, tensors in gradients.items():
        norm = torch.nn.utils.get_total_norm(tensors)
        total += norm.float().to(total.device) ** 2 * (pieces / holders)
    return world.sum_over_replica(total).sqrt()


@torch.no_grad()
def clip_gradients(gradients: dict[int, list[Tensor]], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients in place by ``max_norm / norm`` if that is below 1."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for tensors in gradients.values():
        multiply_(tensors, scale.to(tensors[0].device))


class GuardedSteps:
    """Takes the steps of an optimizer. If the device decides whether to skip one, the host learns that one step later."""

    def __init__(self, optimizer: Optimizer, on_host: bool) -> None:
        """
        Args:
            on_host: whether the optimizer works on the host although the flags are on a device.
        """
        self._optimizer = optimizer
        self._conditional = optimizer if isinstance(optimizer, SkipsOnDevice) and not on_host else None
        self._skipped: bool | HostCopy = False  # a copy in flight holds the negation, for the same reason

    def decidable(self, skip: bool | Tensor) -> bool | Tensor:
        """Return ``skip``. If it is a tensor and the optimizer cannot decide on the device, wait for its value."""
        if self._conditional is not None or isinstance(skip, bool):
            return skip
        return not bool(~skip)  # negated: a simulated device answers with true, which must mean that the step is taken

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


log = logging.getLogger(__name__)


class MissingGradients:
    """Reports each parameter without a gradient once. Of the ranks with the same layers, only the first reports."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], world: World, lifecycle: Lifecycle) -> None:
        self._trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self._reports = world.is_first_along("batch", "sequence", "weights")
        self._lifecycle = lifecycle
        self._reported: set[str] = set()

    def check(self, step: int) -> None:
        """Check the gradients of ``step`` before the optimizer's update."""
        names = [name for name, parameter in self._trained if parameter.grad is None and name not in self._reported]
        if not names or not self._reports:
            return
        self._reported.update(names)
        message = (
            f"step {step}: {len(names)} of {len(self._trained)} parameters received no gradient and are not trained: "
            f"{', '.join(names)}"
        )
        # An error, because ranks other than the first log only errors.
        log.error(
            "%s; freeze them (training.freeze) if that is intended, else compare with one device by `titan verify`", message
        )
        with same_generators():
            self._lifecycle.finding(Finding("no gradient", message, step))
