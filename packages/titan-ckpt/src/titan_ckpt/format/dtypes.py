"""Data types that a checkpoint may contain, and lossless conversions between them. Does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from titan_core.api import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ITEM_BYTES: Final[dict[str, int]] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "complex128": 16, "complex64": 8,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
    "bool": 1,
}  # fmt: skip
"""Size of an element in bytes, by the dtype's name in ``torch``."""

_EXACT: Final[dict[str, tuple[str, ...]]] = {
    "float16": ("float32", "float64"),
    "bfloat16": ("float32", "float64"),
    "float32": ("float64",),
}

FLOATS: Final = ("float64", "float32", "float16", "bfloat16")
"""Data types in which weights are stored unquantised."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in manifests: ``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def converts_exactly(source: str, target: str) -> bool:
    """Whether ``target`` can represent every value of ``source``."""
    return source == target or target in _EXACT.get(source, ())


def to_dtype(tensor: Tensor, dtype: torch.dtype | None, name: str) -> Tensor:
    """Convert ``tensor`` to ``dtype``, unless that is ``None`` or the tensor does not hold floating-point numbers.

    Raises:
        UserError: a value is too large for ``dtype``. The message calls the tensor ``name``.
    """
    if dtype is None or not tensor.is_floating_point():
        return tensor
    converted = tensor.to(dtype)
    if overflows(tensor, converted):
        import torch

        largest, limit = tensor.abs().max().item(), torch.finfo(dtype).max
        why = f"its largest value is {largest:.3g}, but {dtype_name(dtype)} is limited to {limit:.3g}"
        raise UserError.one(name, why, "use --dtype bfloat16 or float32")
    return converted


def overflows(tensor: Tensor, converted: Tensor) -> bool:
    """Whether a finite value of ``tensor`` became infinite in ``converted``."""
    return bool((converted.isinf() & ~tensor.isinf()).any())
