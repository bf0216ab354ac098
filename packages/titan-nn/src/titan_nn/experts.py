"""What modules of experts compute: a layer for each expert, moving tokens to their experts and back, and the choice.

Shape suffixes in comments: N tokens, D width, K experts that a token passes through, R = N x K rows, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ALIGNMENT = 16
"""Bytes that the strides of the operands of ``torch.nn.functional.grouped_mm`` must be a multiple of (torch 2.15)."""
_ON_ALL_DEVICES = (2, 15)
"""torch's version from which its grouped product was found right on CPUs and in fp32; before, in bf16 on GPUs only."""


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor, *, masked: bool = True) -> Tensor:
    """Apply the linear layer of each expert to that expert's rows: ``rows[r] @ weight[expert of r].T``.

    Rows after the first ``counts.sum()`` belong to no expert. Their values, which may be anything, have no effect; their
    results are zero, and so are their gradients. Experts without rows have gradients of zeros.

    Uses ``torch.nn.functional.grouped_mm`` if it supports the operands, for which the host does not wait; else a loop.

    Args:
        rows: ``[rows, in]``, sorted by expert.
        weight: ``[experts, out, in]``, of the dtype of ``rows``.
        counts: number of rows of each expert, int64 ``[experts]``.
        masked: ``False`` leaves the results and gradients of rows without an expert undefined. That saves two copies of
            ``rows`` if :func:`mask_rows` is applied before the first and after the last of several products.

    Returns:
        ``[rows, out]``.
    """
    if masked:
        return mask_rows(grouped_linear(mask_rows(rows, counts), weight, counts, masked=False), counts)
    if _has_kernel(rows, weight):
        return F.grouped_mm(rows, weight.transpose(-2, -1), offs=counts.cumsum(0).to(torch.int32))
    sizes = counts.tolist()
    *pieces, rest = rows.split([*sizes, rows.shape[0] - sum(sizes)])
    # Experts without rows compute too, so that every expert has a gradient.
    results = [F.linear(piece, one) for piece, one in zip(pieces, weight.unbind(), strict=True)]
    return torch.cat([*results, rest.new_zeros(rest.shape[0], weight.shape[1])])


class GroupedLinear(nn.Module):
    """:func:`grouped_linear` as a module without parameters. A module of experts computes its products with such a child, so
    that transforms can replace how they are computed (in eight bits, say) by a subclass of it, in any model."""

    def forward(self, rows: Tensor, weight: Tensor, counts: Tensor, *, masked: bool = True) -> Tensor:
        """See :func:`grouped_linear`."""
        return grouped_linear(rows, weight, counts, masked=masked)


class BesideExperts(nn.Module):
    """Calls a module of experts, and computes what else the block needs of its input, such as shared experts. A transform
    that moves rows between ranks replaces it by a subclass that computes this while the rows are on their way, in any
    model."""

    def forward(
        self, experts: nn.Module, rows: Tensor, counts: Tensor, other: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return what ``experts``, called with ``rows`` and ``counts``, and ``other`` return.

        Args:
            experts: see :class:`titan_core.api.Experts`.
            other: computes what does not depend on ``experts``. Is called once.
        """
        return experts(rows, counts), other()


def grouped_weight_gradient(gradient: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """Return the gradient of the weight of :func:`grouped_linear`: the sum of ``outer(gradient[r], rows[r])`` over the rows
    of each expert, ``[experts, out, in]``. Rows of no expert have no effect.

    Args:
        gradient: of the results, ``[rows, out]``, of the dtype of ``rows``.
        rows: ``[rows, in]``, sorted by expert.
        counts: number of rows of each expert, int64 ``[experts]``.
    """
    if _in_kernel(rows, (gradient.shape[1], rows.shape[1])):
        return F.grouped_mm(gradient.contiguous().mT, rows.contiguous(), offs=counts.cumsum(0).to(torch.int32))
    sizes = counts.tolist()
    sizes.append(rows.shape[0] - sum(sizes))
    pieces = zip(gradient.split(sizes), rows.split(sizes), strict=True)
    return torch.stack([left.mT @ right for left, right in pieces][:-1])


def mask_rows(rows: Tensor, counts: Tensor) -> Tensor:
    """Return ``rows``, ``[rows, dim]``, with zeros in all but the first ``counts.sum()``; the gradient likewise."""
    belongs = torch.arange(rows.shape[0], device=rows.device) < counts.sum()
    return torch.where(belongs[:, None], rows, 0)  # a product would keep what is not a number


def _has_kernel(rows: Tensor, weight: Tensor) -> bool:
    if weight.dtype != rows.dtype or not _in_kernel(rows, weight.shape[1:]):
        return False
    # The trial's large weights overlap themselves (titan_core.model.stand_in).
    return rows.is_contiguous() and (weight.is_contiguous() or weight.mT.is_contiguous())


def _in_kernel(rows: Tensor, sides: Sequence[int]) -> bool:
    """Whether torch's grouped product takes the dtype and device of ``rows``, and weights with ``sides``, (out, in)."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < _ON_ALL_DEVICES and (rows.dtype != torch.bfloat16 or rows.device.type == "cpu"):
        return False
    aligned = all(size * rows.element_size() % _ALIGNMENT == 0 for size in sides)
    return aligned and rows.dtype in (torch.float32, torch.bfloat16)


def permute_to_experts(tokens: Tensor, chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Copy each token once for each of its experts, sorted by expert, then by token. Copies and sums only, which are
    deterministic on GPUs; so is the gradient.

    Args:
        tokens: ``[tokens, dim]``.
        chosen: the experts of each token, int64 ``[tokens, per_token]``.
        experts: number of experts.

    Returns:
        The rows, ``[tokens * per_token, dim]``; the number of rows of each expert, int64 ``[experts]``; and for
        :func:`combine` the row of each choice, int64 ``[tokens, per_token]``.
    """
    sorted_experts, order = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(sorted_experts, torch.arange(experts, device=chosen.device), right=True)
    places = inverse(order).view_as(chosen)
    rows: Tensor = _Copy.apply(tokens, order, places)
    return rows, ends.diff(prepend=ends.new_zeros(1)), places


def combine(outputs: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts. Deterministic, as :func:`permute_to_experts`.

    Args:
        outputs: what the experts return, ``[rows, dim]``, in the order of the rows of :func:`permute_to_experts`.
        weights: ``[tokens, per_token]``.
        places: the row of each choice, int64 ``[tokens, per_token]``.

    Returns:
        ``[tokens, dim]``, of the dtype of ``outputs``.
    """
    order = places.flatten()
    further = outputs.shape[0] > order.shape[0]
    of_choices = move_rows(outputs, order, inverse(order, outputs.shape[0]), partial=further).unflatten(0, places.shape)
    return (of_choices * weights[..., None].to(outputs.dtype)).sum(1)


def inverse(order: Tensor, size: int | None = None) -> Tensor:
    """Return, for each of ``size`` values, where ``order`` contains it; -1 if nowhere.

    Args:
        order: int64; values from 0 to ``size - 1``, each at most once, or -1.
        size: default: the length of ``order``.
    """
    size = order.shape[0] if size is None else size
    found = order.new_full((size + 1,), -1)
    places = torch.arange(order.shape[0], device=order.device)
    return found.scatter(0, torch.where(order < 0, size, order), places)[:size]


def move_rows(rows: Tensor, order: Tensor, back: Tensor, *, partial: bool = False) -> Tensor:
    """Return ``rows[order]``. Its gradient is a gather as well: deterministic, unlike that of indexing on a GPU.

    Args:
        rows: ``[rows, dim]``.
        order: int64 ``[moved]``; no row is named twice.
        back: the inverse of ``order``, int64 ``[rows]``.
        partial: whether ``order`` or ``back`` may have -1, for zeros. That costs another copy of the rows.
    """
    result: Tensor = _Move.apply(rows, order, back, partial)
    return result


class _Copy(torch.autograd.Function):
    """Row ``r`` is a copy of the token of choice ``order[r]``."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return tokens[order // places.shape[1]]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gradients[0][places].sum(1), None, None


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor, partial: bool) -> Tensor:
        ctx.save_for_backward(back)
        ctx.partial = partial
        return _taken(rows, order, partial)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        return _taken(gradients[0], back, ctx.partial), None, None, None


def _taken(rows: Tensor, order: Tensor, partial: bool) -> Tensor:
    if not partial:
        return rows[order]
    if rows.shape[0] == 0:
        return rows.new_zeros(order.shape[0], *rows.shape[1:])
    return torch.where((order >= 0)[:, None], rows[order.clamp(min=0)], 0)


class ExpertChoice(nn.Module):
    """Turns the scores of a router into its choice of experts: those with the highest scores, or with the lower index of
    equal ones, on any device and for any shape. Transforms wrap this module, to balance the experts or to force a choice.

    With groups (DeepSeek-V3, arXiv 2412.19437, section 2.1.2), only experts in the best groups can be chosen, by the sum of
    a group's two highest scores.

    Selective recomputation saves the choice: it is a ``topk``.

    Args:
        experts: number of experts.
        per_token: number of experts to choose.
        groups: number of groups of successive experts.
        chosen_groups: number of groups that a token can choose from.
        bias: whether there is a bias of each expert, which is added to the scores for the choice only.

    Raises:
        ValueError: the groups do not divide the experts, or too few of them remain to choose from.
    """

    bias: Tensor | None
    """fp32 ``[experts]``, a persistent buffer, or ``None``. The balancing without an auxiliary loss changes it (Wang et al.,
    arXiv 2408.15664)."""

    def __init__(self, experts: int, per_token: int, *, groups: int = 1, chosen_groups: int = 1, bias: bool = False) -> None:
        super().__init__()
        if experts % groups or not chosen_groups <= groups or per_token > experts // groups * chosen_groups:
            raise ValueError(f"cannot choose {per_token} of {experts} experts in {chosen_groups} of {groups} groups")
        if groups > 1 and experts // groups < 2:
            raise ValueError(f"{groups} groups of {experts} experts have fewer than the two experts that they are scored by")
        self.per_token, self.groups, self.chosen_groups = per_token, groups, chosen_groups
        self.register_buffer("bias", torch.zeros(experts, dtype=torch.float32) if bias else None)

    def forward(self, scores: Tensor) -> Tensor:
        """Choose the experts of each token.

        Args:
            scores: fp32 ``[tokens, experts]``.

        Returns:
            Indices, int64 ``[tokens, per_token]``, the best first.
        """
        scores = scores.detach()
        if self.bias is not None:
            scores = scores + self.bias
        if self.groups > 1:
            grouped = scores.unflatten(-1, (self.groups, -1))
            chosen = _highest(grouped.topk(2, dim=-1).values.sum(-1), self.chosen_groups)
            allowed = (chosen[..., None] == torch.arange(self.groups, device=scores.device)).any(-2)
            scores = grouped.masked_fill(~allowed[..., None], -torch.inf).flatten(-2)
        return _highest(scores, self.per_token)


def _highest(scores: Tensor, number: int) -> Tensor:
    """Return the indices of the highest fp32 scores, in descending order; of equal ones, the lower index first.

    Which of equal values torch's ``topk`` returns depends on the device and the shape. It therefore compares integers that
    are all different: the bits of a score, in an order that is the order of the scores, then those of its index.
    """
    bits = (scores + 0.0).view(torch.int32)  # -0.0 and 0.0 are equal
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    last = scores.shape[-1] - 1
    keys = (ordered << 32) | (last - torch.arange(last + 1, device=scores.device))
    return keys.topk(number, dim=-1).indices
