"""Norms over features that tensor parallelism shards: RMSNorm (Zhang and Sennrich, arXiv 1910.07467) and LayerNorm (Ba et
al., arXiv 1607.06450) of any class, as OLMo-2 (arXiv 2501.00656) has them over the queries of all heads.

A rank has some of the features, and the mean is that of all ranks' features. A module does not say how it computes: whether
it subtracts the mean, what it adds to its weight, and in which type it multiplies. So it is compared with each formula on
random numbers, and a module that equals none is refused.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from titan_core.api import UserError
from titan_parallel.region_collectives import Ranks, sum_over_ranks

_SCALES: Final = (1e-4, 1e-2, 1.0, 30.0)
"""Of the rows on which modules are compared with formulas. ``eps`` decides the first ones."""

_DEFAULT_EPS: Final = torch.finfo(torch.float32).eps
"""Of :class:`torch.nn.RMSNorm`, in every type (torch 2.11 to 2.15)."""


@dataclass(frozen=True)
class Norm:
    """A formula."""

    eps: float
    centred: bool
    """Whether the mean is subtracted first (LayerNorm)."""
    offset: float
    """Added to the weight."""
    rounds_first: bool
    """Whether the result is rounded to the input's type before it is multiplied by the weight."""

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the norm of ``x``, ``[..., this rank's features]``.

        Args:
            mean: ``[..., this rank's features]`` to ``[..., 1]``, the mean over all features.
        """
        wide = x.float()
        if self.centred:
            wide = wide - mean(wide)
        result = wide * torch.rsqrt(mean(wide.square()) + self.eps)
        if self.rounds_first:
            result = result.to(x.dtype)
        if weight is not None:
            scale = weight if self.rounds_first else weight.float()
            result = result * (scale + self.offset if self.offset else scale)
        if bias is not None:
            result = result + bias
        return result if self.rounds_first else result.to(x.dtype)


def divide_norm(module: nn.Module, name: str, ranks: Ranks) -> None:
    """Make ``module``, whose parameters are still whole, take the mean over the features of all ranks.

    Raises:
        UserError: it computes no norm.
    """
    formula = norm_of(module, name)
    features = next(module.parameters(recurse=False)).numel()

    def mean(x: Tensor) -> Tensor:
        return sum_over_ranks(x.sum(-1, keepdim=True), ranks) / features

    def forward(x: Tensor) -> Tensor:
        return formula(x, module.weight, getattr(module, "bias", None), mean)  # type: ignore[arg-type]

    module.forward = forward


def norm_of(module: nn.Module, name: str) -> Norm:
    """Return the formula of ``module``. Its tensors may be on the meta device.

    Raises:
        UserError: it computes none.
    """
    try:
        exact, rounded = (dict(_differences(module, dtype)) for dtype in (torch.float32, torch.bfloat16))
        fitting = [norm for norm in exact if exact[norm] <= 1e-5 and rounded.get(norm, 1.0) <= 1e-2]
        why = "computes neither RMSNorm nor LayerNorm of its input's last dimension"
    except Exception as error:  # noqa: BLE001 - the module's code may raise anything
        fitting, why = [], f"raises {type(error).__name__} for a tensor: {' '.join(str(error).split())[:200]}"
    if not fitting:
        fix = "compute the norm in a module of its own that takes one tensor, or make its region whole: Replicate() for all"
        raise UserError.one(f"module {name!r} of the model", f"has the rule Shard(0, norm=True), but {why}", fix)
    return min(fitting, key=lambda norm: rounded[norm])


def _differences(module: nn.Module, dtype: torch.dtype) -> Iterator[tuple[Norm, float]]:
    """Yield each formula, with its largest relative difference from ``module`` in ``dtype``."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) + 0.5).to(dtype)

    own = copy.deepcopy(module)
    for leaf, parameter in module.named_parameters(recurse=False):
        own.register_parameter(leaf, nn.Parameter(draw(*parameter.shape), requires_grad=False))
    parameters = dict(own.named_parameters())
    features = next(iter(parameters.values())).numel()
    x = draw(len(_SCALES), features) * torch.tensor(_SCALES, dtype=dtype)[:, None]
    expected: Any = own.forward(x)
    if not isinstance(expected, Tensor) or expected.shape != x.shape:
        raise TypeError("it does not return a tensor like its input")
    numbers = [value for value in vars(module).values() if isinstance(value, float)] or [_DEFAULT_EPS]
    for eps, centred, offset, rounds in itertools.product(numbers, (False, True), (0.0, 1.0), (False, True)):
        norm = Norm(eps, centred, offset, rounds)
        found = norm(x, parameters.get("weight"), parameters.get("bias"), lambda wide: wide.mean(-1, keepdim=True))
        if found.dtype == expected.dtype:
            difference = (found.double() - expected.double()).abs().amax(-1) / expected.double().abs().amax(-1)
            yield norm, float(difference.max())
