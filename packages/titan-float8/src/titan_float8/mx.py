"""Linear layers in formats with scales of blocks: MXFP8, based on ``torchao`` (OCP Microscaling Formats 1.0; Rouhani et al.,
arXiv 2310.10537; recipes for training: Mishra et al., arXiv 2506.08027), and NVFP4 (:mod:`titan_float8.nvfp4`)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from titan_core.api import ModelLayout, ModelPart, ModelTrial, Problem, TrainingContext
from titan_float8.config import MXSection
from titan_float8.experts import convert_experts, experts_of, record_flops_of_experts
from titan_float8.grouped_mx import BLOCK, MXGroupedLinear
from titan_float8.layers import ConvertedLinear, linear_layers, record_flops, require_matches, require_some
from titan_float8.nvfp4 import NVFP4Linear
from titan_float8.torchao_prototypes import (
    KernelPreference,
    MXFP8Dim0CastKernelChoice as Rows,
    MXFP8Dim1CastKernelChoice as Columns,
    ScaleCalculationMode,
    mx_product,
)

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
    layers = _layers(part.named_modules(), part.layout, context)
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


def check_model(model: nn.Module, trial: ModelTrial, context: TrainingContext[MXSection]) -> Iterator[Problem]:
    """Require the layers in NVFP4, which round gradients by a token's place in the batch, to be called with sequences."""
    if not context.section.recipe_name.startswith("nvfp4"):
        return
    sequences = tuple(trial.tokens.shape)
    for call in trial.calls_of(_layers(model.named_modules(), trial.layout, context)):
        shape = call.arguments[0] if call.arguments else None
        if isinstance(shape, tuple) and (len(shape) < 3 or shape[:2] != sequences):
            why = (
                f"NVFP4 rounds by a token's place in the batch, and {call.name!r} is called with {list(shape)}, not "
                f"[batch, seq, features] (batch {sequences[0]}, seq {sequences[1]})"
            )
            yield context.config.problem("mx.filter_fqns", why, f"add {call.name!r} to it, which stays in high precision")


def _layers(
    modules: Iterable[tuple[str, nn.Module]], layout: ModelLayout, context: TrainingContext[MXSection]
) -> dict[str, nn.Linear]:
    """Return the linear layers to convert."""
    section = context.section
    # Tensor parallelism shards one dimension of a weight, and must not cut through a block.
    multiple = BLOCK * context.job.mesh.degree("tp")
    return dict(linear_layers(modules, layout, section.filter_fqns, section.convert_head, multiple))


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
        mx_product()
        converted = super().from_linear(layer, section)
        floor = section.recipe_name == "mxfp8_floor"
        converted.scaling = ScaleCalculationMode.FLOOR if floor else ScaleCalculationMode.RCEIL
        return converted

    def _matmul(self, input: Tensor, weight: Tensor) -> Tensor:
        kernels, rows, columns = KERNELS[self.emulate]
        output: Tensor = mx_product().apply(
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
