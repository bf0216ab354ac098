"""Orthogonalisation of matrices by Newton-Schulz iterations (Keller Jordan et al., "Muon: An optimizer for hidden layers in
neural networks", 2024), and the scale of the updates (Liu et al., "Muon is scalable for LLM training", arXiv 2502.16982,
section 2.2)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic a x + b x^3 + c x^5, which moves singular values in (0, 1] close to 1 in a few iterations
(Jordan, 2024)."""
EPS = 1e-7


def orthogonalized(matrices: Tensor, steps: int) -> Tensor:
    """Approximate ``U V^T`` for each matrix ``U S V^T`` of ``matrices``, ``[n, rows, columns]``, in their data type."""
    a, b, c = COEFFICIENTS
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.mT  # multiply along the shorter side
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)  # singular values are at most 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT


def orthogonalized_parts(matrices: Tensor, parts: tuple[int, ...], steps: int, rule: str) -> Tensor:
    """Return :func:`orthogonalized` of each of the ``parts`` that matrices ``[n, rows, columns]`` consist of.

    Args:
        parts: rows of each part. If their scales differ, the results are in proportion; the largest has factor 1.
        rule: see :func:`update_scale`.
    """
    if len(parts) == 1:
        return orthogonalized(matrices, steps)
    columns = matrices.shape[2]
    scales = [update_scale(rows, columns, rule) for rows in parts]
    found = [
        orthogonalized(part, steps) * (scale / max(scales))
        for part, scale in zip(matrices.split(parts, dim=1), scales, strict=True)
    ]
    return torch.cat(found, dim=1)


def update_scale(rows: int, columns: int, rule: str) -> float:
    """Return the factor that ``muon.scale = rule`` gives a matrix of shape ``[rows, columns]``."""
    return math.sqrt(max(1.0, rows / columns)) if rule == "original" else 0.2 * math.sqrt(max(rows, columns))
