"""Trying a model takes memory for its activations alone, not for its weights."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness import small_gpt
from harness.model_trials import CP, require
from harness.odd_gpts import Of, shifted
from harness.tiny import TinyArgs
from harness.tiny import layout as layout_of
from harness.tiny_model import TinyModel
from titan_core.api.errors import UserError

WIDE = TinyArgs(dim=16_384, n_layers=3, n_heads=128, n_kv_heads=8, ffn_dim=53_248, vocab_size=128_256, max_seq_len=131_072)
"""Three layers of Llama 3.1's 126 with 405 billion parameters."""


class Shifted(TinyModel):
    """Hidden states of the last block's input lean on the position before."""

    def __init__(self) -> None:
        super().__init__(WIDE)
        last = self.layers[str(len(self.layers) - 1)]
        last.ffn_norm = Of(shifted)  # type: ignore[assignment]


class Largest(TorchDispatchMode):
    """The largest tensor outside of the meta device, in bytes."""

    bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, Tensor) and one.device.type != "meta":
                self.bytes = max(self.bytes, one.untyped_storage().nbytes())
        return result


def test_a_large_model_is_tried_in_little_memory() -> None:
    """One layer that mixes positions is found, and no weight of gigabytes is made for it."""
    layout = layout_of(WIDE)
    with Largest() as largest:
        require(small_gpt.job_of(small_gpt.definition(lambda: TinyModel(WIDE), layout), CP, 2))
    with largest, pytest.raises(UserError, match=r"module 'layers\.2\.ffn_norm' depends on other positions"):
        require(small_gpt.job_of(small_gpt.definition(Shifted, layout), CP, 2))
    assert largest.bytes < 64 << 20
