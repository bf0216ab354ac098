"""The trial of a model needs memory only for its activations, not for its weights."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness import small_gpt
from harness.model_trials import CP, require
from harness.odd_gpts import Of, shifted
from titan_core.api import UserError
from titan_testing.tiny import TinyArgs, layout as layout_of
from titan_testing.tiny_model import TinyModel

WIDE = TinyArgs(dim=16_384, n_layers=3, n_heads=128, n_kv_heads=8, ffn_dim=53_248, vocab_size=128_256, max_seq_len=131_072)
"""Three of the 126 layers of Llama 3.1 405B."""


class Shifted(TinyModel):
    """A model whose last block mixes each position with the one before."""

    def __init__(self) -> None:
        super().__init__(WIDE)
        last = self.layers[str(len(self.layers) - 1)]
        last.ffn_norm = Of(shifted)  # type: ignore[assignment]


class Largest(TorchDispatchMode):
    """Records the largest tensor outside the meta device, in bytes."""

    bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        for output in result if isinstance(result, tuple | list) else (result,):
            if isinstance(output, Tensor) and output.device.type != "meta":
                self.bytes = max(self.bytes, output.untyped_storage().nbytes())
        return result


def test_a_large_model_is_tried_in_little_memory() -> None:
    """The trial finds one layer that mixes positions without allocating its gigabytes of weights."""
    layout = layout_of(WIDE)
    with Largest() as largest:
        require(small_gpt.job_of(small_gpt.definition(lambda: TinyModel(WIDE), layout), CP, 2))
    with largest, pytest.raises(UserError, match=r"module 'layers\.2\.ffn_norm' depends on other positions"):
        require(small_gpt.job_of(small_gpt.definition(Shifted, layout), CP, 2))
    assert largest.bytes < 64 << 20
