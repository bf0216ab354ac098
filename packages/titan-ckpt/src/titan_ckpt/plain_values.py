"""Python values as JSON and back, exactly: a tuple stays a tuple and an integer key an integer. Nothing is guessed, and
nothing is unpickled: what JSON cannot say is refused by name.

What JSON has is kept as it is; anything else is an object with one key that begins with ``$``.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from titan_ckpt.dtypes import dtype_name

_SMALL = 64
"""Elements of a tensor that is kept among plain values."""
_SEQUENCES: dict[type, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset"}
_MAPPINGS: dict[type, str] = {dict: "$dict", OrderedDict: "$OrderedDict", Counter: "$Counter"}


class Unsaveable(Exception):
    """A value that a checkpoint cannot keep.

    Args:
        name: what it is called.
        why: what is wrong with it.
    """

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name} {why}")
        self.name, self.why = name, why


@contextmanager
def damaged(what: str) -> Iterator[None]:
    """What goes wrong inside with values that were read from a manifest is wrong with these.

    Raises:
        ValueError: naming ``what``.
    """
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{what}: {type(error).__name__}: {error}") from error


def encode(value: Any, name: str, tensor: Callable[[Tensor, str], Any] | None = None) -> Any:
    """``value``, which is called ``name``, as JSON.

    Args:
        tensor: says what stands for a tensor inside of it. Default: its elements, of a small one.

    Raises:
        Unsaveable: JSON cannot say it.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Tensor):
        return (tensor or _elements)(value, name)
    if kind is list:
        return [encode(one, f"{name}.{number}", tensor) for number, one in enumerate(value)]
    if kind in _SEQUENCES:
        ordered = sorted(value, key=repr) if kind in (set, frozenset) else value
        return {_SEQUENCES[kind]: [encode(one, f"{name}.{number}", tensor) for number, one in enumerate(ordered)]}
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(one, f"{name}.{key}", tensor) for key, one in value.items()}
    if kind in _MAPPINGS:
        pairs = [[encode(key, f"{name}.{key}"), encode(one, f"{name}.{key}", tensor)] for key, one in value.items()]
        return {_MAPPINGS[kind]: pairs}
    if kind is torch.dtype:
        return {"$dtype": dtype_name(value)}
    raise Unsaveable(name, f"is a {kind.__module__}.{kind.__qualname__}, which JSON cannot hold")


def decode(value: Any, tensor: Callable[[Any], Tensor] | None = None) -> Any:
    """What :func:`encode` was given.

    Args:
        tensor: makes a tensor of what ``encode``'s argument of that name returned, a table with the key ``$stored``.

    Raises:
        ValueError: it is nothing that :func:`encode` returns.
    """
    if isinstance(value, list):
        return [decode(one, tensor) for one in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if "$stored" in value and tensor is not None:
        return tensor(value)
    if not tag.startswith("$"):
        return {key: decode(one, tensor) for key, one in value.items()}
    inner = value[tag]
    try:
        for kind, name in _SEQUENCES.items():
            if tag == name:
                return kind(decode(one, tensor) for one in inner)
        for kind, name in _MAPPINGS.items():
            if tag == name:
                return kind({decode(key, tensor): decode(one, tensor) for key, one in inner})
        if tag == "$float":
            return float(inner)
        if tag == "$dtype" and isinstance(getattr(torch, inner), torch.dtype):
            return getattr(torch, inner)
        if tag == "$tensor":
            return torch.tensor(inner["elements"], dtype=getattr(torch, inner["dtype"])).reshape(inner["shape"])
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{tag}: {error}") from None
    raise ValueError(f"{tag!r} is not known")


def require_alike(value: Any, present: Any, name: str) -> None:
    """``value``, which was read, must be of the kind of ``present``, which it is to replace. Numbers are of one kind, and
    ``None`` may become anything, and anything ``None``. Tuples must have as many elements, each of its kind.

    Raises:
        ValueError: it is not.
    """
    if value is None or present is None:
        return
    if _kind(value) is not _kind(present) or (isinstance(value, tuple) and len(value) != len(present)):
        raise ValueError(f"{name} is {value!r}, in the place of {present!r}")
    if isinstance(value, tuple):
        for number, (one, other) in enumerate(zip(value, present, strict=True)):
            if one is None and other is not None:
                raise ValueError(f"{name} is {value!r}, in the place of {present!r}")
            require_alike(one, other, f"{name}.{number}")


def _kind(value: Any) -> type:
    return float if type(value) is int or (isinstance(value, Tensor) and value.dim() == 0) else type(value)


def _elements(value: Tensor, name: str) -> Any:
    if type(value) not in (Tensor, torch.nn.Parameter) or value.numel() > _SMALL:
        raise Unsaveable(name, f"is a tensor of {value.numel()} elements, in a place that holds small ones")
    if not (value.is_floating_point() or value.dtype in (torch.int64, torch.int32, torch.bool)):
        raise Unsaveable(name, f"is a tensor of {value.dtype}")
    exact = value.detach().to("cpu", torch.float64 if value.is_floating_point() else value.dtype)
    elements = [encode(one, name) for one in exact.reshape(-1).tolist()]
    if any(isinstance(one, dict) for one in elements):
        raise Unsaveable(name, "is a tensor with an element that is not finite")
    return {"$tensor": {"dtype": dtype_name(value.dtype), "shape": list(value.shape), "elements": elements}}
