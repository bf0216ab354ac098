"""Linear layers and products of experts in float8, based on ``torchao.float8`` (TorchTitan paper, section 2.4; Micikevicius
et al., arXiv 2209.05433)."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

from titan_core.api import ModelPart, Run, StepReport, TrainingContext, hookimpl
from titan_float8.checks import gathers_float8
from titan_float8.config import AUTO_FILTER, Float8Section
from titan_float8.experts import convert_experts, experts_of, record_flops_of_experts
from titan_float8.grouped import FilledRows, LowPrecisionGroupedLinear
from titan_float8.layers import linear_layers, record_flops, require_matches, require_some, round_as_eager
from titan_float8.tensor_parallel import cast_gathered_inputs, scale_over_ranks
from titan_float8.torch_private import all_gather_as_bytes, gains_from_float8
from titan_nn.experts import grouped_linear

log = logging.getLogger(__name__)

_E4M3 = torch.float8_e4m3fn
_MULTIPLE = 16
"""Both dimensions of a weight must be multiples of this number (``torch._scaled_mm``)."""
_LARGEST = (torch.ops.aten.max.default, torch.ops.aten.amax.default)
"""Operators that compute scales. Recomputing one costs a pass over a tensor, plus a collective under tensor parallelism; its
result is only one number per tensor or row."""
_HIGH_PRECISION_SHARE = {"tensorwise": 0.0, "rowwise": 0.0, "rowwise_with_gw_hp": 1 / 3}
"""Fraction of a layer's three matmuls that stay in high precision."""


def apply(part: ModelPart, context: TrainingContext[Float8Section]) -> ModelPart:
    """Convert the linear layers of ``part`` to float8. Names and weights do not change."""
    section = context.section
    filters = [pattern for pattern in section.filter_fqns if pattern != AUTO_FILTER]
    layers = dict(linear_layers(part.named_modules(), part.layout, filters, section.convert_head, _MULTIPLE))
    if AUTO_FILTER in section.filter_fqns:
        layers = {name: layer for name, layer in layers.items() if _gains(section.recipe_name, name, layer)}
    experts = convert_experts(part, section, filters, Float8GroupedLinear, context.job.mesh.degree("tp"))
    require_some({*layers, *experts}, part, "float8")
    require_matches(part, filters, "float8", experts_of(part) if section.convert_experts else ())
    config = linear_config(section, gathers_float8(context))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torchao's own deprecations
        convert_to_float8_training(part.module, config=config, module_filter_fn=lambda module, name: name in layers)
    part.saved_operators += _LARGEST
    if section.recipe_name == "tensorwise" and context.job.mesh.degree("tp") > 1:
        tensor_parallel = context.mesh["tp"]
        cast_gathered_inputs(part, layers, config, tensor_parallel)
        scale_over_ranks(part, layers, tensor_parallel)
        if context.device.type != "cuda":
            all_gather_as_bytes()
    if section.recipe_name != "tensorwise":
        round_as_eager(part, (*layers, *experts))
    if not section.emulate:
        share = 1 - _HIGH_PRECISION_SHARE[section.recipe_name]
        record_flops(part, layers, share)
        record_flops_of_experts(part, experts, share)
    found = f"{len(layers)} linear layers" + (f", {len(experts)} modules of experts" if experts else "")
    log.info("float8 (%s%s): %s", section.recipe_name, ", emulated" if section.emulate else "", found)
    return part


def linear_config(section: Float8Section, gather: bool) -> Float8LinearConfig:
    """Return the options for ``torchao``."""
    recipe = Float8LinearConfig.from_recipe_name(section.recipe_name)
    return dataclasses.replace(recipe, emulate=section.emulate, enable_fsdp_float8_all_gather=gather)


def observe(parts: Sequence[ModelPart], context: TrainingContext[Float8Section]) -> object:
    """Return the observer that precomputes scales after each step; it does nothing unless the config requests it."""
    return PrecomputedScales(parts if _precomputes(context) else ())


class PrecomputedScales:
    """Computes the scales of all weights together whenever the weights have changed."""

    def __init__(self, parts: Sequence[ModelPart]) -> None:
        self._parts = parts
        for part in parts:
            part.weights_changed += (partial(precompute_float8_dynamic_scale_for_fsdp, part.module),)

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Compute the scales of the initial or restored weights."""
        self._compute()

    @hookimpl
    def titan_step_end(self, report: StepReport) -> None:
        """Compute the scales for the next step."""
        self._compute()

    def _compute(self) -> None:
        for part in self._parts:
            precompute_float8_dynamic_scale_for_fsdp(part.module)


def _precomputes(context: TrainingContext[Float8Section]) -> bool:
    section = context.section
    return section.precompute_float8_dynamic_scale_for_fsdp and gathers_float8(context)


def _gains(recipe: str, name: str, layer: nn.Linear) -> bool:
    """Whether ``layer`` is large enough to run faster in float8."""
    # torchao has no measurements for this recipe, but all its float8 matmuls are those of "rowwise".
    measured = "rowwise" if recipe == "rowwise_with_gw_hp" else recipe
    return gains_from_float8(measured, name, layer)


class Float8GroupedLinear(LowPrecisionGroupedLinear):
    """Scales rows along their features, and weights along the features that the product contracts, as the recipe
    "rowwise_with_gw_hp" does in linear layers. But for the gradient of the input, each input feature of an expert's weight
    has a scale, not the weight."""

    format = "float8"
    multiple = _MULTIPLE

    @staticmethod
    def multiply(rows: Tensor, weight: Tensor, counts: Tensor, emulate: bool) -> Tensor:
        """See :meth:`LowPrecisionGroupedLinear.multiply`."""
        (low_rows, row_scales), (low_weight, weight_scales) = _rounded(rows), _rounded(weight)
        if emulate:  # powers of two: division rounds nothing
            exact_rows, exact_weight = low_rows.float() / row_scales, low_weight.float() / weight_scales
            return grouped_linear(exact_rows.to(rows.dtype), exact_weight.to(rows.dtype), counts, masked=False)
        filled = FilledRows(counts, rows.shape[0], Float8GroupedLinear.multiple)
        result = F.scaled_grouped_mm(  # type: ignore[attr-defined]  # not in torch's stubs
            # Bytes: not all operators have float8 types. The byte 0 is the number 0.
            filled.fill(low_rows.contiguous().view(torch.uint8)).view(_E4M3),
            low_weight.contiguous().mT,
            filled.fill(row_scales.squeeze(-1).reciprocal()),
            F.ScalingType.RowWise,
            weight_scales.squeeze(-1).reciprocal(),
            F.ScalingType.RowWise,
            offs=filled.ends,
            output_dtype=torch.bfloat16,  # the only one that the kernel has
        )
        return result[filled.places].to(rows.dtype)


def _rounded(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``tensor`` in float8, and the fp32 scales by which its rows (along the last dimension) were multiplied."""
    scales = tensor_to_scale(
        tensor,
        _E4M3,
        scaling_granularity=ScalingGranularity.AXISWISE,
        axiswise_dim=-1,
        round_scales_to_power_of_2=True,
    )
    return to_fp8_saturated(tensor.float() * scales, _E4M3), scales
