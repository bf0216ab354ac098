"""Finds the tensors in the arguments and results of operators."""

from __future__ import annotations

from typing import Any

from torch import Tensor, UntypedStorage


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    _add_tensors(value, found)
    return found


def _add_tensors(value: Any, found: list[Tensor]) -> None:
    """Add the tensors in ``value`` to ``found``. Not an inner function: one that calls itself is a cycle, which would keep
    all that it sees alive."""
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add_tensors(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _add_tensors(item, found)


def storage_key(storage: UntypedStorage) -> int:
    """Return a number that identifies a living storage: torch keeps one Python object for each."""
    return id(storage)


def is_view(operator: Any) -> bool:
    """Whether ``operator`` returns a view of its argument by its signature, and so neither computes nor allocates."""
    return getattr(operator, "is_view", False)


def shown(tensor: Tensor) -> str:
    """Return shape and type of ``tensor`` for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
