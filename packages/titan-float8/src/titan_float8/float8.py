"""Linear layers in float8, by ``torchao.float8`` (TorchTitan paper, section 2.4; Micikevicius et al., arXiv 2209.05433)."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Sequence

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

from titan_core.api.build_context import TrainingContext
from titan_core.api.events import RunStart, StepReport
from titan_core.api.hookspecs import hookimpl
from titan_core.api.model_part import ModelPart
from titan_float8.config import AUTO_FILTER, Float8Section
from titan_float8.float8_check import gathers_float8
from titan_float8.gathered_inputs import cast_gathered_inputs
from titan_float8.layers import linear_layers, require_matches, require_some
from titan_float8.slots import count_products
from titan_float8.torch_private import all_gather_as_bytes, gains_from_float8

log = logging.getLogger(__name__)

_MULTIPLE = 16
"""What both sides of a product must be a multiple of (``torch._scaled_mm``)."""
_LARGEST = (torch.ops.aten.max.default, torch.ops.aten.amax.default)
"""What scales are computed from: a pass over a whole tensor, and under tensor parallelism a collective, for one number a
tensor or a row."""
_HIGH_PRECISION_SHARE = {"tensorwise": 0.0, "rowwise": 0.0, "rowwise_with_gw_hp": 1 / 3}
"""Of the three products of a layer, what part stays in high precision."""


def apply(part: ModelPart, context: TrainingContext[Float8Section]) -> ModelPart:
    """Let the linear layers of ``part`` compute in float8. Names and weights stay as they are."""
    section = context.section
    filters = [one for one in section.filter_fqns if one != AUTO_FILTER]
    layers = dict(linear_layers(part, filters, section.convert_head, _MULTIPLE))
    if AUTO_FILTER in section.filter_fqns:
        layers = {name: layer for name, layer in layers.items() if _gains(section.recipe_name, name, layer)}
    require_some(layers, part, "float8")
    require_matches(part, filters, "float8")
    config = linear_config(section, gathers_float8(context))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torchao's own, about what it calls itself
        convert_to_float8_training(part.module, config=config, module_filter_fn=lambda module, name: name in layers)
    part.saved_operators += _LARGEST
    if section.recipe_name == "tensorwise" and context.facts.mesh.degree("tp") > 1:
        cast_gathered_inputs(part, layers, config)
        if context.device.type != "cuda":
            all_gather_as_bytes()
    if not section.emulate:
        count_products(part, layers, 1 - _HIGH_PRECISION_SHARE[section.recipe_name])
    log.info("float8 (%s%s): %d linear layers", section.recipe_name, ", emulated" if section.emulate else "", len(layers))
    return part


def linear_config(section: Float8Section, gather: bool) -> Float8LinearConfig:
    """What ``torchao`` is to do."""
    recipe = Float8LinearConfig.from_recipe_name(section.recipe_name)
    return dataclasses.replace(recipe, emulate=section.emulate, enable_fsdp_float8_all_gather=gather)


def observe(parts: Sequence[ModelPart], context: TrainingContext[Float8Section]) -> object:
    """What is done after each step: nothing, where scales are found when weights are gathered."""
    return PrecomputedScales(parts if _precomputes(context) else ())


class PrecomputedScales:
    """The scales of all weights, found at once when the weights have changed."""

    def __init__(self, parts: Sequence[ModelPart]) -> None:
        self._parts = parts

    @hookimpl
    def titan_train_start(self, run: RunStart) -> None:
        """For the first step's weights, or those that were restored."""
        self._compute()

    @hookimpl
    def titan_step_end(self, report: StepReport) -> None:
        """For the next step's."""
        self._compute()

    def _compute(self) -> None:
        for part in self._parts:
            precompute_float8_dynamic_scale_for_fsdp(part.module)


def _precomputes(context: TrainingContext[Float8Section]) -> bool:
    section = context.section
    return section.precompute_float8_dynamic_scale_for_fsdp and gathers_float8(context)


def _gains(recipe: str, name: str, layer: nn.Linear) -> bool:
    """Whether the layer is large enough, by ``torchao``'s measurements on H100."""
    # For the recipe with weights' gradients in high precision it has none; its other products are those of "rowwise".
    known = "rowwise" if recipe == "rowwise_with_gw_hp" else recipe
    return gains_from_float8(known, name, layer)
