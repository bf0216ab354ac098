"""The model that Titan trains: the library's, with modules of Titan in place of those that join what is divided: fused
projections, and recurrences."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from titan_models_hf import transformers_private as library
from titan_models_hf.config import HFArgs
from titan_models_hf.fused import FusedLinear, Rows, rows_of
from titan_models_hf.library import plain_model
from titan_models_hf.recurrent.gated_delta_net import GatedDeltaNet
from titan_models_hf.recurrent.mamba import Mamba


def rearranged_model(args: HFArgs) -> tuple[Any, dict[str, Rows]]:
    """Return the model on the meta device, and what its parameters consist of that the library joins with others.

    Raises:
        UserError: see :func:`titan_models_hf.library.plain_model`.
    """
    model = plain_model(args)
    rows: dict[str, Rows] = {}
    with torch.device("meta"):
        for name, module in list(model.named_modules()):
            if (recurrent := _recurrent(module, model.config)) is not None:
                model.set_submodule(name, recurrent)
                rows |= recurrent.rows(name)
            elif isinstance(module, nn.Linear) and (sizes := _sizes(model, name, module)):
                fused = FusedLinear(module, sizes)
                model.set_submodule(name, fused)
                rows |= rows_of(f"{name}.parts", fused.parts, name)
    return model, rows


def _recurrent(module: Any, config: Any) -> GatedDeltaNet | Mamba | None:
    kind = type(module).__name__
    joined = hasattr(module, "in_proj_qkvz") or hasattr(module, "in_proj_qkv")
    if kind.endswith("GatedDeltaNet") and joined and hasattr(module, "num_v_heads"):
        return GatedDeltaNet(module)
    if kind == "FalconH1Mixer" and not module.mamba_rms_norm:
        return Mamba(module, tuple(config.ssm_multipliers))
    return None


def _sizes(model: Any, name: str, module: nn.Linear) -> tuple[int, ...]:
    """Return the outputs of each layer that a linear layer of the library joins; empty if it is one layer."""
    owner, _, leaf = name.rpartition(".")
    parent = model.get_submodule(owner)
    if leaf == "gate_up_proj" and type(parent).__name__.endswith("MLP"):
        return (module.out_features // 2,) * 2
    if leaf == "qkv_proj" and type(parent).__name__ == "Phi3Attention":
        attention: Any = type(parent)
        parent.__class__ = _by_parts(attention)
        keys = parent.num_key_value_heads * parent.head_dim
        return (module.out_features - 2 * keys, keys, keys)
    return ()


@cache
def _by_parts(base: Any) -> Any:
    """Return a subclass of Phi-3's attention that takes queries, keys and values from the parts of its projection, of which
    tensor parallelism leaves a rank some of the heads."""
    rotate = library.function_of(base, "apply_rotary_pos_emb")

    def forward(
        self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], attention_mask: Any = None,
        past_key_values: Any = None, **keywords: Any,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        q, k, v = (part(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in self.qkv_proj.parts)
        q, k = rotate(q, k, *position_embeddings)
        attend = library.attention_of(base, self.config)
        window = self.config.sliding_window
        mixed, weights = attend(
            self, q, k, v, attention_mask, dropout=self.attention_dropout if self.training else 0.0, scaling=self.scaling,
            sliding_window=window, **keywords,
        )  # fmt: skip
        return self.o_proj(mixed.flatten(2)), weights

    return type(base.__name__, (base,), {"forward": forward})
