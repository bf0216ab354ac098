"""Descriptions of the initial values of parameters. Free of torch.

A value depends only on (seed, fully qualified name, global element index), so it is the same on any mesh;
:mod:`titan_core.model.random_values` computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from titan_core.api.plugins.ref import Ref

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Constant:
    """Every element is ``value``."""

    value: float
    """The value."""


@dataclass(frozen=True)
class Normal:
    """Normal distribution with mean 0 and standard deviation ``std``."""

    std: float
    """Standard deviation."""


@dataclass(frozen=True)
class TruncatedNormal:
    """Normal distribution with mean 0, truncated to ``limit`` standard deviations; ``std`` applies before truncation."""

    std: float
    """Standard deviation before truncation."""
    limit: float = 3.0
    """Largest magnitude, in standard deviations."""


@dataclass(frozen=True)
class Uniform:
    """Uniform distribution over ``[low, high)``."""

    low: float
    """Smallest value."""
    high: float
    """Upper bound, exclusive."""


@dataclass(frozen=True)
class Elements:
    """Some elements of a parameter, in any order: those that a rank holds, or a piece of them."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    index: tuple[Tensor, ...]
    """Index of each element along each dimension of the whole parameter; int64, ``[elements]``."""
    uniform: Callable[[], Tensor]
    """Returns a random number for each element, uniform over ``(0, 1)``; fp32, ``[elements]``. Each call draws others. They
    depend only on (seed, fully qualified name, global element index)."""


@dataclass(frozen=True)
class Computed:
    """Values that a function computes from the elements' indices and random numbers.

    For a recurrence, for example::

        def timescales(elements: Elements, low: float, high: float) -> Tensor:  # log-uniform, through an inverse softplus
            dt = (elements.uniform() * math.log(high / low) + math.log(low)).exp()
            return dt + (-(-dt).expm1()).log()

        "layers.*.dt_bias": Computed(Ref("my_titan_plugin.values:timescales"), {"low": 1e-3, "high": 0.1})
    """

    values: Ref[Callable[..., Tensor]]
    """``(elements, **arguments)`` -> the value of each element, finite floating-point numbers ``[elements]`` on the device
    of :attr:`Elements.index`. Each value must depend on its own element only, not on which others are computed with it."""
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Keyword arguments of ``values``."""


@dataclass(frozen=True)
class Loaded:
    """Values that no rule draws. A job must load the parameter from a file, and is refused otherwise."""

    why: str
    """Why there is no rule."""


InitialValue = Constant | Normal | TruncatedNormal | Uniform | Computed | Loaded
"""One of the six ways to initialise a parameter."""
