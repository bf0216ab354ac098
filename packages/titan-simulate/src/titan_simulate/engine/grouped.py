"""Grouped products, ``torch.nn.functional.grouped_mm`` and its scaled variants: one product for each expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from titan_simulate.engine import known_values


@dataclass(frozen=True)
class GroupedProduct:
    """The sizes of a grouped product."""

    groups: int
    rows: int
    """Of a group, as all of the following."""
    inner: int
    columns: int
    length: int
    """Of the dimension that the groups divide."""
    counted: int
    """How much of it belongs to a group. The kernel leaves out the rest."""
    flops: int
    """Of all groups."""


def grouped_product(args: Sequence[Any], keywords: dict[str, Any]) -> GroupedProduct:
    """Return the sizes of a grouped product of these arguments. What belongs to no group counts only if the values of the
    groups' ends are not known.

    A factor of two dimensions is divided by the groups: the rows of the left one, the columns of the right one, or, if both
    have two, the inner dimension. One of three dimensions has a matrix for each group.
    """
    left, right = args[0], args[1]
    tensors = [one for one in (*args[2:], *keywords.values()) if isinstance(one, Tensor)]
    ends = next((one for one in tensors if one.dim() == 1 and not one.dtype.is_floating_point), None)
    groups = left.shape[0] if left.dim() == 3 else right.shape[0] if right.dim() == 3 else 1 if ends is None else len(ends)
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    length = rows if right.dim() == 3 else columns if left.dim() == 3 else inner
    if ends is None or left.dim() == right.dim() == 3:
        return GroupedProduct(groups, rows, inner, columns, length, length, 2 * groups * rows * inner * columns)
    known = known_values.values_of(ends)
    counted = length if known is None or not len(known) else min(length, int(known[-1]))
    flops = 2 * rows * inner * columns * counted // max(1, length)
    each = -(-counted // max(1, groups))
    if right.dim() == 3:
        rows = each
    elif left.dim() == 3:
        columns = each
    else:
        inner = each
    return GroupedProduct(groups, rows, inner, columns, length, counted, flops)
