"""Linear layers in formats with scales of blocks: MXFP8, based on ``torchao`` (OCP Microscaling Formats 1.0; Rouhani et al.,
arXiv 2310.10537; recipes for training: Mishra et al., arXiv 2506.08027), and NVFP4 (:mod:`titan_float8.nvfp4`)."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice as Rows,
    MXFP8Dim1CastKernelChoice as Columns,
    ScaleCalculationMode,
)
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from titan_core.api import ModelPart, TrainingContext, UserError
from titan_float8.config import MXSection
from titan_float8.experts import convert_experts, experts_of, record_flops_of_experts
from titan_float8.grouped_mx import BLOCK, MXGroupedLinear
from titan_float8.layers import ConvertedLinear, linear_layers, record_flops, require_matches, require_some
from titan_float8.nvfp4 import NVFP4Linear

log = logging.getLogger(__name__)

_E4M3 = torch.float8_e4m3fn

KERNELS = {
    True: (KernelPreference.EMULATED, Rows.TORCH, Columns.TORCH),
    False: (KernelPreference.AUTO, Rows.TRITON, Columns.CUDA),
}
"""Emulated or not -> kernels for matmuls, for scaling along rows, and for scaling along columns."""


def apply(part: ModelPart, context: TrainingContext[MXSection]) -> ModelPart:
    """Convert the linear layers of ``part`` to MXFP8 or NVFP4. Names and weights do not change."""
    section = context.section
    degree = context.job.mesh.degree("tp")
    kind = NVFP4Linear if section.recipe_name.startswith("nvfp4") else MXLinear
    # Tensor parallelism shards one dimension of a weight, and must not cut through a block.
    layers = dict(linear_layers(part, section.filter_fqns, section.convert_head, BLOCK * degree))
    experts = convert_experts(part, section, section.filter_fqns, MXGroupedLinear, degree)
    require_some({*layers, *experts}, part, "mx")
    require_matches(part, section.filter_fqns, "mx", experts_of(part) if section.convert_experts else ())
    for name, layer in layers.items():
        part.module.set_submodule(name, kind.from_linear(layer, section))
    if not section.emulate:
        share = 2 / 3 if section.recipe_name.endswith("wgrad_with_hp") else 1.0
        record_flops(part, layers, share, torch.float4_e2m1fn_x2 if kind is NVFP4Linear else torch.float8_e4m3fn)
        record_flops_of_experts(part, experts, share)
    found = f"{len(layers)} linear layers" + (f", {len(experts)} modules of experts" if experts else "")
    log.info("%s%s: %s", section.recipe_name, " (emulated)" if section.emulate else "", found)
    return part


class MXLinear(ConvertedLinear):
    """A linear layer that computes its three matmuls, forward and backward, in MXFP8.

    Under tensor parallelism, its weight is this rank's shard. No block of features crosses ranks, so scales are the same.
    """

    scaling: ScaleCalculationMode

    @classmethod
    def from_linear(cls, layer: nn.Linear, section: MXSection) -> MXLinear:
        """Return a layer that shares the parameters of ``layer``.

        Raises:
            UserError: torchao cannot be used with this triton.
        """
        _product()
        converted = super().from_linear(layer, section)
        floor = section.recipe_name == "mxfp8_floor"
        converted.scaling = ScaleCalculationMode.FLOOR if floor else ScaleCalculationMode.RCEIL
        return converted

    def _matmul(self, input: Tensor, weight: Tensor) -> Tensor:
        kernels, rows, columns = KERNELS[self.emulate]
        output: Tensor = _product().apply(
            input,
            weight,
            _E4M3,
            _E4M3,
            _E4M3,
            BLOCK,
            kernels,
            rows,
            columns,
            self.scaling,
            self.weight_gradient_in_high_precision,
        )
        return output


def _product() -> Any:
    try:
        from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    except ValueError as error:  # torchao 0.18 on a GPU with triton 3.9: github.com/pytorch/ao, pull request 4880
        reason = f"its MX kernels cannot be imported ({error})"
        raise UserError.one("package torchao", reason, "install torchao above 0.18, or triton below 3.9") from None
    return mx_mm
