"""Gated DeltaNet (Yang et al., arXiv 2412.06464), as Qwen3-Next and its successors have it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_models_hf.facts import Recurrence
from titan_models_hf.fused import FusedLinear, Rows, rows_of
from titan_models_hf.recurrent.convolution import CausalConvolution
from titan_models_hf.recurrent.linear_recurrence import LinearRecurrence


class GatedDeltaNet(nn.Module):
    """Each key head serves ``groups`` value heads. Under tensor parallelism, a rank has some of the heads.

    Args:
        source: the library's module.
    """

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.key_width, self.value_width = source.head_k_dim, source.head_v_dim
        self.groups = source.num_v_heads // source.num_k_heads
        sizes = source.key_dim, source.key_dim, source.value_dim
        self.fused = hasattr(source, "in_proj_qkvz")
        if self.fused:
            self.in_proj_qkvz, self.in_proj_ba = source.in_proj_qkvz, source.in_proj_ba
        else:
            self.in_proj_qkv = FusedLinear(source.in_proj_qkv, sizes)
            self.in_proj_z, self.in_proj_b, self.in_proj_a = source.in_proj_z, source.in_proj_b, source.in_proj_a
        width, bias = source.conv_kernel_size, source.conv1d.bias is not None
        self.conv1d = nn.ModuleList(CausalConvolution(size, width, bias) for size in sizes)
        self.dt_bias, self.A_log = source.dt_bias, source.A_log
        self.norm, self.out_proj = source.norm, source.out_proj
        self.titan_mixer = LinearRecurrence()

    def rows(self, name: str) -> dict[str, Rows]:
        """Return what the parameters consist of that the library's module ``name`` joins."""
        found = rows_of(f"{name}.conv1d", self.conv1d, f"{name}.conv1d")
        if not self.fused:
            found |= rows_of(f"{name}.in_proj_qkv.parts", self.in_proj_qkv.parts, f"{name}.in_proj_qkv")
        return found

    def rules(self) -> dict[str, str]:
        """Return the name of a rule for each parameter: key heads are divided, each with its value heads."""
        rules = {name: "shard 0" if "." not in name or name.startswith("conv1d.") else "column"
                 for name, _ in self.named_parameters()}  # fmt: skip
        return {**rules, "norm.weight": "replicate", "out_proj.weight": "row"}

    def recurrence(self) -> Recurrence:
        """Return what the mixer of the whole module computes."""
        heads = len(self.A_log)
        return Recurrence(
            heads=heads, kv_heads=heads // self.groups, key_width=self.key_width, value_width=self.value_width, delta=True
        )

    def forward(self, hidden_states: Tensor, documents: Tensor | None = None, **others: Any) -> Tensor:
        """
        Args:
            hidden_states: ``[batch, seq, dim]``, as the result.
            documents: document of each position, ``[batch, whole seq]``.
            others: keywords that the library passes, of which none has an effect without its caches and masks.
        """
        q, k, v, z, b, a = self._projected(hidden_states)
        more = () if documents is None else (documents,)
        q, k, v = (F.silu(mix(x, *more)) for mix, x in zip(self.conv1d, (q, k, v), strict=True))
        q, k = (_unit(x.unflatten(-1, (-1, self.key_width))).repeat_interleave(self.groups, dim=2) for x in (q, k))
        v = v.unflatten(-1, (-1, self.value_width))
        log_decay = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
        mixed = self.titan_mixer(q * self.key_width**-0.5, k, v, log_decay, b.sigmoid(), *more)
        normed = self.norm(mixed.reshape(-1, self.value_width), z.reshape(-1, self.value_width))
        result: Tensor = self.out_proj(normed.view(*hidden_states.shape[:2], -1))
        return result

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return what becomes queries, keys, values, gate, step sizes and decays, ``[batch, seq, ...]``."""
        if not self.fused:
            q, k, v = (part(x) for part in self.in_proj_qkv.parts)
            return q, k, v, self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)
        sizes = [self.key_width, self.key_width, self.groups * self.value_width, self.groups * self.value_width]
        parts = self.in_proj_qkvz(x).unflatten(-1, (-1, sum(sizes))).split(sizes, dim=-1)
        b, a = self.in_proj_ba(x).unflatten(-1, (-1, 2 * self.groups)).chunk(2, dim=-1)
        q, k, v, z, b, a = (part.flatten(2) for part in (*parts, b, a))
        return q, k, v, z, b, a


def _unit(x: Tensor) -> Tensor:
    """Return vectors of length one, in fp32."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)
