"""Experts of the library's models, computed from rows that are sorted by expert.

The library calls a module of experts with the hidden states, the experts of each token and their weights. Expert parallelism
moves rows between ranks, and needs a module that is called with the rows of the experts alone
(:class:`titan_core.api.Experts`). The library's module becomes one: its parameters keep their names, its *call* sorts the
tokens and combines the outputs, and its ``forward`` computes the rows of whichever experts it holds.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_models_hf import transformers_private as library
from titan_nn.experts import GroupedLinear, combine, mask_rows, permute_to_experts


def compute_by_rows(module: nn.Module) -> None:
    """Let ``module``, which computes by the library's experts function, compute from rows sorted by expert."""
    cls: Any = type(module)
    module.__class__ = _by_rows(cls)
    module.titan_product = GroupedLinear()


def compute_by_library(module: nn.Module) -> None:
    """Undo :func:`compute_by_rows`."""
    base: Any = type(module).__base__
    module.__class__ = base
    del module.titan_product


def is_by_rows(module: nn.Module) -> bool:
    """Return whether ``module`` is one of :func:`compute_by_rows`."""
    return type(module).__call__ is _call


def _call(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """
    Args:
        hidden: ``[tokens, dim]``.
        chosen: the experts of each token, int64 ``[tokens, per_token]``; those that this module does not have add nothing.
        weights: ``[tokens, per_token]``.
    """
    rows, counts, places = permute_to_experts(hidden, chosen, self.num_experts)
    return combine(nn.Module.__call__(self, rows, counts), weights, places)


def _forward(self: Any, rows: Tensor, counts: Tensor) -> Tensor:
    """
    Args:
        rows: see :class:`titan_core.api.Experts`.
        counts: number of rows of each expert, int64 ``[experts]``.
    """
    first = _linear(self, "gate_up_proj" if self.has_gate else "up_proj", mask_rows(rows, counts), counts)
    return mask_rows(_linear(self, "down_proj", library.expert_activation(self)(first), counts), counts)


def _linear(module: Any, name: str, rows: Tensor, counts: Tensor) -> Tensor:
    """Apply a layer of each expert to its rows. Results and gradients of rows without an expert are undefined."""
    weight = getattr(module, name)
    result = module.titan_product(rows, weight.mT if module.is_transposed else weight, counts, masked=False)
    if not module.has_bias:
        return result
    experts = torch.searchsorted(counts.cumsum(0), torch.arange(rows.shape[0], device=rows.device), right=True)
    # Rows without an expert have a bias of their own, so that their gradients reach no other.
    return result + F.pad(getattr(module, f"{name}_bias"), (0, 0, 0, 1))[experts]


@cache
def _by_rows(base: Any) -> type:
    """Return a subclass of the library's class of experts ``base``."""
    return type(base.__name__, (base,), {"__call__": _call, "forward": _forward})
