"""Results of random operators in a trial: constants, or other values, which show whether a draw has an effect.

The other values of uniform draws and of masks alternate between the ends of their range, so that a draw that rarely has an
effect, such as a jitter of 1e-6 or a dropout of one in a million, has one here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_KEPT = 0.9
"""Factor that a dropout scales by. Not 1, so that an extra application shows."""
_aten = torch.ops.aten


class Draws:
    """The random draws of one forward pass."""

    def __init__(self, other: bool = False) -> None:
        """
        Args:
            other: whether to return other values than the constants.
        """
        self.other = other
        self.operators: list[str] = []
        """Names of the operators that drew."""
        self.unknown = False
        """Whether one of them has no constant, so that its effect cannot be judged."""
        self.in_python = False
        """Whether Python's generator or numpy's drew."""

    def draw(self, operator: Any, *arguments: Any, **keywords: Any) -> Any:
        """Return what ``operator`` returns, which draws."""
        self.operators.append(operator.overloadpacket.__name__)
        values = _VALUES.get(operator.overloadpacket)
        if values is None:
            self.unknown = True
            return operator(*arguments, **keywords)
        return values(self, operator, *arguments, **keywords)

    def ends(self, like: Tensor) -> Tensor:
        """Return 0 and the number below 1 by turns, in the shape of ``like``. Of single numbers, the first is 0."""
        first = len(self.operators) - 1 if like.numel() == 1 else 0
        turns = torch.arange(first, first + like.numel(), device=like.device).view(like.shape) % 2
        return turns * (1.0 - 2.0**-24)


def _uniform(draws: Draws, operator: Any, tensor: Any, *arguments: Any, **keywords: Any) -> Tensor:
    result: Tensor = operator(tensor, *arguments, **keywords)
    low, high = (*arguments, *(0.0, 1.0)[len(arguments) :])[:2]
    low, high = keywords.get("from", low), keywords.get("to", high)
    share = draws.ends(result) if draws.other else torch.full_like(result, 0.5)
    return result.copy_(low + (high - low) * share)


def _unit(draws: Draws, operator: Any, *arguments: Any, **keywords: Any) -> Tensor:
    result: Tensor = operator(*arguments, **keywords)
    return result.copy_(draws.ends(result)) if draws.other else result.fill_(0.5)


def _constant(value: float) -> Callable[..., Tensor]:
    def fill(draws: Draws, operator: Any, *arguments: Any, **keywords: Any) -> Tensor:
        result: Tensor = operator(*arguments, **keywords)
        return result if draws.other else result.fill_(value)

    return fill


def _mask(draws: Draws, like: Tensor, p: Any) -> Tensor:
    """Return ones with probability ``p``, multiplied by :data:`_KEPT`; or ones and zeros by turns, where it is neither 0 nor
    1."""
    constant = _KEPT * p * torch.ones_like(like)
    if not draws.other:
        return constant
    certain = (torch.as_tensor(p, device=like.device) <= 0.0) | (torch.as_tensor(p, device=like.device) >= 1.0)
    return torch.where(certain, constant, (draws.ends(like) > 0.0).to(like.dtype))


def _bernoulli_(draws: Draws, operator: Any, tensor: Tensor, p: Any = 0.5, **keywords: Any) -> Tensor:
    return tensor.copy_(_mask(draws, tensor, p))


def _bernoulli(draws: Draws, operator: Any, tensor: Tensor, p: float | None = None, **keywords: Any) -> Tensor:
    return _mask(draws, tensor, tensor if p is None else p)


def _dropout(draws: Draws, operator: Any, tensor: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    factor = draws.ends(tensor) if draws.other else _KEPT
    return factor * tensor, torch.ones_like(tensor, dtype=torch.bool)


_VALUES: dict[Any, Callable[..., Any]] = {
    _aten.bernoulli_: _bernoulli_,
    _aten.bernoulli: _bernoulli,
    _aten.native_dropout: _dropout,
    **dict.fromkeys((_aten.uniform_, _aten.uniform), _uniform),
    **dict.fromkeys((_aten.rand, _aten.rand_like), _unit),
    **dict.fromkeys((_aten.randn, _aten.randn_like, _aten.normal_, _aten.normal), _constant(0.1)),
    **dict.fromkeys((_aten.exponential_, _aten.exponential), _constant(1.0)),
    **dict.fromkeys((_aten.randint, _aten.randint_like), _constant(0)),
}
