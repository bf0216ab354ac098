"""Checks of values that functions of plugins return: numbers, names, lists, mappings and tensors."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from titan_core.api.plugins.ref import CodeOrigin
from titan_core.plugins.guarded_object import Check, WrongResult, shown
from titan_core.toolkit.plain_json import survives_json


def require(holds: bool, result: object, must: str) -> None:
    """Raise that the function returned ``result`` and what it ``must`` do, unless the result ``holds``."""
    if not holds:
        raise WrongResult(f"returned {shown(result)}; it must {must}")


def anything(origin: CodeOrigin, result: Any) -> Any:
    """The result of a function that is called for what it does."""
    return result


def instance_of(kind: type, must: str = "", none: bool = False) -> Check:
    """Return the check for an instance of ``kind`` (``bool`` is no ``int``), or ``None`` if that is allowed."""
    must = must or f"return a {kind.__name__}" + (" or None" if none else "")

    def check(origin: CodeOrigin, result: Any) -> Any:
        right = isinstance(result, kind) and (kind is not int or not isinstance(result, bool))
        require(right or (none and result is None), result, must)
        return result

    return check


def at_least(low: int, none: bool = False) -> Check:
    """Return the check for a whole number of at least ``low``."""

    def check(origin: CodeOrigin, result: Any) -> Any:
        right = isinstance(result, int) and not isinstance(result, bool) and result >= low
        must = f"be a whole number, at least {low}" + (", or None" if none else "")
        if not (right or (none and result is None)):
            raise WrongResult(f"is {shown(result)}; it must {must}")
        return result

    return check


def list_of(kind: type, none: bool = False) -> Check:
    """Return the check for a list of ``kind``; for ``None``, which means an empty one, if that is allowed."""

    def check(origin: CodeOrigin, result: Any) -> Any:
        if none and result is None:
            return []
        right = isinstance(result, Sequence) and not isinstance(result, str | bytes)
        require(right and all(isinstance(one, kind) for one in result), result, f"return a list of {kind.__name__}")
        return result

    return check


def is_word(name: object) -> bool:
    """Return whether ``name`` is a word of letters, digits and _."""
    return isinstance(name, str) and name.isidentifier()


def is_figure(value: object) -> bool:
    """Return whether ``value`` is a finite number, at least 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def figure(origin: CodeOrigin, result: Any) -> Any:
    """A finite number, at least 0."""
    require(is_figure(result), result, "return a finite number, at least 0")
    return result


def figures(origin: CodeOrigin, result: Any) -> Any:
    """Numbers by name, each finite or ``None``; or nothing."""
    must = "return a mapping from names to numbers"
    require(result is None or isinstance(result, Mapping), result, must)
    for name, value in (result or {}).items():
        if not isinstance(name, str) or not isinstance(value, float | int | None):
            raise WrongResult(f"returned {shown(name)}: {shown(value)}; it must {must}")
        if value is not None and not math.isfinite(value):
            raise WrongResult(f"returned {name!r}: {value}; a figure that is unknown or not finite must be None")
    return result or {}


def skip(origin: CodeOrigin, result: Any) -> Any:
    """Whether an update is to be skipped: a bool, or a tensor that may still be computed."""
    torch: Any = sys.modules.get("torch")  # if torch is not imported, no tensor exists
    flag = torch is not None and isinstance(result, torch.Tensor) and result.dtype is torch.bool and not result.dim()
    require(result is None or isinstance(result, bool) or flag, result, "return a bool, a 0-d bool tensor or None")
    return result


def state(origin: CodeOrigin, result: Any) -> Any:
    """Plain values by name, which are saved as JSON; or nothing."""
    must = "return a dict of plain values with string keys, because it is saved as JSON"
    require(result is None or (isinstance(result, dict) and survives_json(result)), result, must)
    return result or {}


def tensors(origin: CodeOrigin, result: Any) -> Any:
    """Tensors by name, or nothing."""
    torch: Any = sys.modules.get("torch")
    right = isinstance(result, Mapping) and all(
        isinstance(name, str) and torch is not None and isinstance(value, torch.Tensor) for name, value in result.items()
    )
    require(result is None or right, result, "return a mapping from names to tensors")
    return result or {}


def tensor(origin: CodeOrigin, result: Any) -> Any:
    """A tensor."""
    torch: Any = sys.modules["torch"]
    require(isinstance(result, torch.Tensor), result, "return a tensor")
    return result


def finite_values(origin: CodeOrigin, result: Any) -> Any:
    """A tensor of finite numbers."""
    torch: Any = sys.modules["torch"]
    right = isinstance(result, torch.Tensor) and result.is_floating_point()
    require(right, _described(result), "return a tensor of floating-point numbers")
    if not bool(torch.isfinite(result).all()):
        raise WrongResult("returned values that are not finite")
    return result


def scalar(origin: CodeOrigin, result: Any) -> Any:
    """A loss: a floating-point tensor without dimensions."""
    torch: Any = sys.modules["torch"]
    right = isinstance(result, torch.Tensor) and result.dim() == 0 and result.is_floating_point()
    require(right, _described(result), "return a scalar: a tensor of a floating-point type without dimensions")
    return result


def module(origin: CodeOrigin, result: Any) -> Any:
    """A module of torch."""
    torch: Any = sys.modules["torch"]
    require(isinstance(result, torch.nn.Module), result, "return an nn.Module")
    return result


def _described(result: Any) -> Any:
    """Return ``result``, or the form of a tensor, whose values may be in flight."""
    torch: Any = sys.modules["torch"]
    return _Form(f"a tensor {list(result.shape)} of {result.dtype}") if isinstance(result, torch.Tensor) else result


class _Form(str):
    __repr__ = str.__str__
