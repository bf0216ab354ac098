"""Converting Python values to JSON and back, exactly: a tuple stays a tuple, and an integer key an integer. Values that
cannot be represented are refused by name; nothing is guessed or unpickled.

JSON values represent themselves. Any other value becomes an object whose only key begins with ``$``.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from titan_ckpt.format.dtypes import dtype_name

_SMALL = 64
"""Largest number of elements of a tensor that is encoded as a plain value."""
_SEQUENCES: dict[type, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset"}
_MAPPINGS: dict[type, str] = {dict: "$dict", OrderedDict: "$OrderedDict", Counter: "$Counter"}


class Unsaveable(Exception):
    """A checkpoint cannot save a value.

    Args:
        name: name of the value.
        why: predicate of the message's sentence, whose subject is ``name``.
    """

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name} {why}")
        self.name, self.why = name, why


@contextmanager
def damaged(what: str) -> Iterator[None]:
    """Treat errors inside the context as damage to values that were read from a manifest.

    Args:
        what: name of the values, for the message.

    Raises:
        ValueError: an error occurred in the context.
    """
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{what}: {type(error).__name__}: {error}") from error


def encode(value: Any, name: str, tensor: Callable[[Tensor, str], Any] | None = None) -> Any:
    """Return ``value`` as JSON. Error messages call it ``name``.

    Args:
        tensor: encodes a tensor within ``value``. Default: encode the elements of a small tensor.

    Raises:
        Unsaveable: ``value`` cannot be represented in JSON.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Tensor):
        return (tensor or _elements)(value, name)
    if kind is list:
        return [encode(item, f"{name}.{number}", tensor) for number, item in enumerate(value)]
    if kind in _SEQUENCES:
        ordered = sorted(value, key=repr) if kind in (set, frozenset) else value
        return {_SEQUENCES[kind]: [encode(item, f"{name}.{number}", tensor) for number, item in enumerate(ordered)]}
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(item, f"{name}.{key}", tensor) for key, item in value.items()}
    if kind in _MAPPINGS:
        pairs = [[encode(key, f"{name}.{key}"), encode(item, f"{name}.{key}", tensor)] for key, item in value.items()]
        return {_MAPPINGS[kind]: pairs}
    if kind is torch.dtype:
        return {"$dtype": dtype_name(value)}
    raise Unsaveable(name, f"is a {kind.__module__}.{kind.__qualname__}, which cannot be represented in JSON")


def decode(value: Any, tensor: Callable[[Any], Tensor] | None = None) -> Any:
    """Return the value that :func:`encode` encoded as ``value``.

    Args:
        tensor: decodes a result of the ``tensor`` argument of :func:`encode`, a dict with the key ``$stored``.

    Raises:
        ValueError: ``value`` is not a result of :func:`encode`.
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if "$stored" in value and tensor is not None:
        return tensor(value)
    if not tag.startswith("$"):
        return {key: decode(item, tensor) for key, item in value.items()}
    inner = value[tag]
    try:
        for kind, name in _SEQUENCES.items():
            if tag == name:
                return kind(decode(item, tensor) for item in inner)
        for kind, name in _MAPPINGS.items():
            if tag == name:
                return kind({decode(key, tensor): decode(item, tensor) for key, item in inner})
        if tag == "$float":
            return float(inner)
        if tag == "$dtype":
            return _dtype(inner)
        if tag == "$tensor":
            return torch.tensor(inner["elements"], dtype=_dtype(inner["dtype"])).reshape(inner["shape"])
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{tag}: {error}") from None
    raise ValueError(f"{tag!r} is an unknown tag")


def _dtype(name: str) -> torch.dtype:
    """
    Raises:
        ValueError: torch has no such type.
    """
    found = vars(torch).get(name)  # not getattr(), which would import modules of torch by name
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a type of tensors")
    return found


def require_same_type(value: Any, present: Any, name: str) -> None:
    """Require ``value``, read from a checkpoint, to have the type of ``present``, which it replaces. All numbers count as
    one type, and either value may be ``None``. Tuples must have equal lengths and elements of equal types.

    Raises:
        ValueError: the types differ. The message calls the value ``name``.
    """
    if value is None or present is None:
        return
    if _kind(value) is not _kind(present) or (isinstance(value, tuple) and len(value) != len(present)):
        raise ValueError(f"{name} is {value!r}, which cannot replace {present!r}")
    if isinstance(value, tuple):
        for number, (item, present_item) in enumerate(zip(value, present, strict=True)):
            if item is None and present_item is not None:
                raise ValueError(f"{name} is {value!r}, which cannot replace {present!r}")
            require_same_type(item, present_item, f"{name}.{number}")


def _kind(value: Any) -> type:
    return float if type(value) is int or (isinstance(value, Tensor) and value.dim() == 0) else type(value)


def _elements(value: Tensor, name: str) -> Any:
    if type(value) not in (Tensor, torch.nn.Parameter) or value.numel() > _SMALL:
        raise Unsaveable(name, f"is a tensor of {value.numel()} elements; tensors here may have at most {_SMALL}")
    if not (value.is_floating_point() or value.dtype in (torch.int64, torch.int32, torch.bool)):
        raise Unsaveable(name, f"is a tensor of {value.dtype}, which is not supported here")
    exact = value.detach().to("cpu", torch.float64 if value.is_floating_point() else value.dtype)
    elements = [encode(element, name) for element in exact.reshape(-1).tolist()]
    if any(isinstance(element, dict) for element in elements):
        raise Unsaveable(name, "is a tensor with a non-finite element")
    return {"$tensor": {"dtype": dtype_name(value.dtype), "shape": list(value.shape), "elements": elements}}
