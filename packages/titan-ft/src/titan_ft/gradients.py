"""Summing the results of a step over replica groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_core.api import ModelPart, UserError
from titan_core.api.parallel.microbatch import AuxiliaryLosses, MetricSums, StepCounts
from titan_ft.groups import ReplicaGroups

BUCKET_BYTES = 32 * 2**20
"""Gradients are summed together in tensors of this size: large enough for the network, small beside the gradients."""


@torch.no_grad()
def sum_step(
    groups: ReplicaGroups,
    parts: Sequence[ModelPart],
    loss: Tensor,
    auxiliary: AuxiliaryLosses,
    metrics: MetricSums,
    digest: int,
    statistics: StepCounts | None = None,
) -> Tensor:
    """Sum the gradients of ``parts``, ``loss``, ``auxiliary``, ``metrics`` and ``statistics`` over ``groups``. All but the
    loss change in place.

    Args:
        digest: of what must be the same in all groups.

    Returns:
        The sum of the losses.

    Raises:
        UserError: this group runs another job than the first group, or its model has a gradient that cannot be summed.
    """
    names = sorted({name for part in parts for name in part.auxiliary_losses})
    metric_names = sorted({name for part in parts for name in part.metrics})
    parameters = [tensor for part in parts for _, tensor in part.named_parameters() if tensor.requires_grad]
    zero = loss.new_zeros(())
    job = [
        torch.tensor([digest if groups.rank == 0 else 0, digest], dtype=torch.float64, device=loss.device),
        torch.stack([loss, *(auxiliary.values.get(name, zero) for name in names)]).double(),
        torch.tensor(
            [*(name in auxiliary.divided for name in names), *(parameter.grad is not None for parameter in parameters)],
            dtype=torch.float64,
            device=loss.device,
        ),
        *(metrics.values.get(name, zero.double().expand(2)) for name in metric_names),
    ]
    header = torch.cat(job)
    groups.sum(header)
    if statistics is not None and statistics.values:
        groups.sum(statistics.counts)  # apart from the header, whose fp64 has no integers above 2**53
    gradients = [_gradient(parameter) for parameter in parameters] if groups.participants > 1 else []
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        groups.sum(flat)
        for gradient, piece in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(piece.view_as(gradient))
    first, all_groups, *rest = header.tolist()
    if groups.failed():
        return loss
    if digest != first:
        why = "runs another job than the first group: its config, mesh, plugins or version of torch differ"
        raise UserError.one("this replica group", why, "compare `titan config show` of both, and start them alike")
    if all_groups != digest * groups.participants:
        groups.reject("a replica group runs another job, and ends")
    divided, present = rest[1 + len(names) : 1 + 2 * len(names)], rest[1 + 2 * len(names) :][: len(parameters)]
    for number, name in enumerate(names):
        auxiliary.values[name] = header[3 + number].to(loss.dtype)
        if divided[number]:
            auxiliary.divided.add(name)
    of_metrics = header[len(header) - 2 * len(metric_names) :]
    metrics.values.update(zip(metric_names, of_metrics.view(-1, 2), strict=True))
    for parameter, groups_with in zip(parameters, present, strict=True):
        if not groups_with:
            parameter.grad = None
    return header[2].to(loss.dtype)


def _gradient(parameter: Tensor) -> Tensor:
    """Return this rank's part of the gradient; zeros if the group's share has none, because that of another may.

    Raises:
        UserError: the gradient is not sharded like its parameter.
    """
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(parameter, DTensor)
    if gradient.placements != parameter.placements:
        why = f"has placements {gradient.placements}, its parameter {parameter.placements}: it cannot be summed over groups"
        raise UserError.one("a gradient", why, "set fault_tolerance.enable = false")
    return gradient.to_local()


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the gradients in lists of one type and device, of at most some :data:`BUCKET_BYTES`."""
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        alike[gradient.dtype, gradient.device].append(gradient)
    for bucket in alike.values():
        part: list[Tensor] = []
        size = 0
        for gradient in bucket:
            part.append(gradient)
            size += gradient.numel() * gradient.element_size()
            if size >= BUCKET_BYTES:
                yield part
                part, size = [], 0
        if part:
            yield part
