"""Mamba-2 (Dao and Gu, arXiv 2405.21060), as Falcon-H1 has it beside attention."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from titan_models_hf.facts import Recurrence
from titan_models_hf.fused import FusedLinear, Rows, rows_of
from titan_models_hf.recurrent.convolution import CausalConvolution
from titan_models_hf.recurrent.linear_recurrence import LinearRecurrence


class Mamba(nn.Module):
    """Heads share the keys and queries of their group. Under tensor parallelism, a rank has some of the heads, and of the
    groups if there are several.

    Args:
        source: the library's module. It must gate without a norm.
        multipliers: factors of the projection's five parts: gate, values, keys, queries, step sizes.
    """

    def __init__(self, source: Any, multipliers: tuple[float, ...]) -> None:
        super().__init__()
        self.head_width, self.state_width = source.head_dim, source.ssm_state_size
        self.groups = source.n_groups
        self.input_factor, self.multipliers, self.limits = source.ssm_in_multiplier, multipliers, source.time_step_limit
        inner, keys = source.intermediate_size, source.n_groups * source.ssm_state_size
        self.in_proj = FusedLinear(source.in_proj, (inner, inner, keys, keys, source.num_heads))
        width, bias = source.conv_kernel_size, source.conv1d.bias is not None
        self.conv1d = nn.ModuleList(CausalConvolution(size, width, bias) for size in (inner, keys, keys))
        self.dt_bias, self.A_log, self.D = source.dt_bias, source.A_log, source.D
        self.out_proj = source.out_proj
        self.titan_mixer = LinearRecurrence()

    def rows(self, name: str) -> dict[str, Rows]:
        """Return what the parameters consist of that the library's module ``name`` joins."""
        return {
            **rows_of(f"{name}.in_proj.parts", self.in_proj.parts, f"{name}.in_proj"),
            **rows_of(f"{name}.conv1d", self.conv1d, f"{name}.conv1d"),
        }

    def rules(self) -> dict[str, str]:
        """Return the name of a rule for each parameter: heads are divided, and groups of heads if there are several."""
        rules = {name: "column" if name.startswith("in_proj.") else "shard 0" for name, _ in self.named_parameters()}
        if self.groups == 1:
            shared = ("in_proj.parts.2.", "in_proj.parts.3.", "conv1d.1.", "conv1d.2.")
            rules |= {name: "replicate" for name in rules if name.startswith(shared)}
        return {**rules, **{name: "row" for name in rules if name.startswith("out_proj.")}}

    def recurrence(self) -> Recurrence:
        """Return what the mixer of the whole module computes."""
        heads = len(self.A_log)
        groups = heads if self.groups == 1 else self.groups
        return Recurrence(heads=heads, kv_heads=groups, key_width=self.state_width, value_width=self.head_width, delta=False)

    def forward(self, hidden_states: Tensor, documents: Tensor | None = None, **others: Any) -> Tensor:
        """
        Args:
            hidden_states: ``[batch, seq, dim]``, as the result.
            documents: document of each position, ``[batch, whole seq]``.
            others: keywords that the library passes, of which none has an effect without its caches and masks.
        """
        x = hidden_states * self.input_factor
        gate, values, keys, queries, steps = (
            part(x) * factor for part, factor in zip(self.in_proj.parts, self.multipliers, strict=True)
        )
        more = () if documents is None else (documents,)
        values, keys, queries = (F.silu(mix(x, *more)) for mix, x in zip(self.conv1d, (values, keys, queries), strict=True))
        values = values.unflatten(-1, (-1, self.head_width)).float()
        # The heads of this rank, whether it has all groups or some.
        heads = values.shape[2]
        keys, queries = (x.unflatten(-1, (-1, self.state_width)).float() for x in (keys, queries))
        keys, queries = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (keys, queries))
        steps = F.softplus(steps + self.dt_bias.to(steps.dtype)).clamp(*self.limits).float()
        log_decay = -self.A_log.float().exp() * steps
        mixed = self.titan_mixer(queries, keys, values * steps.unsqueeze(-1), log_decay, None, *more)
        mixed = (mixed + self.D.unsqueeze(-1) * values).flatten(2)
        result: Tensor = self.out_proj((mixed * F.silu(gate)).to(hidden_states.dtype))
        return result
