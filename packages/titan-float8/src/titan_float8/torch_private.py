"""All private API of torchao and PyTorch that this package uses. Checked with torchao 0.18 and torch 2.11 to 2.15.

* ``torchao.float8._auto_filter_for_recipe``: torchao's measurements of which layers gain from float8.
* ``torchao.float8.float8_ops.FLOAT8_OPS_TABLE`` and the fields of ``Float8TrainingTensor``: gloo has no float8 types.
* ``torch.ops._c10d_functional``: the all-gather operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchao.float8 import _auto_filter_for_recipe
from torchao.float8.float8_ops import FLOAT8_OPS_TABLE
from torchao.float8.float8_training_tensor import Float8TrainingTensor


def gains_from_float8(recipe: str, name: str, layer: nn.Linear) -> bool:
    """Whether ``layer`` is large enough to run faster with ``recipe`` ("tensorwise" or "rowwise"), as measured on H100."""
    return bool(_auto_filter_for_recipe(recipe, filter_fqns=[])(layer, name))


def all_gather_as_bytes() -> None:
    """Make float8 tensors all-gather as bytes, in the whole process: gloo has no float8 types."""

    def gather(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any] | None = None) -> Float8TrainingTensor:
        shard: Any = arguments[0]
        data = shard._data.contiguous()
        gathered = operator(data.view(torch.uint8), *arguments[1:], **(keywords or {})).view(data.dtype)
        return Float8TrainingTensor(gathered, shard._scale, shard.dtype, shard._linear_mm_config, shard._gemm_input_role)

    FLOAT8_OPS_TABLE[torch.ops._c10d_functional.all_gather_into_tensor.default] = gather
