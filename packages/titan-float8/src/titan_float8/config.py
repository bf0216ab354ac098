"""Config sections of titan-float8, and what planning a job needs to know of them. Keys that TorchTitan had in 2025 keep its
names. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from titan_core.api import Costs, JobContext, Section

AUTO_FILTER = "auto_filter_small_kn"


class Float8Section(Section):
    section: ClassVar[str] = "float8"
    may_change: ClassVar[tuple[str, ...]] = ("emulate",)  # changes no number

    enable: bool = False
    """Compute linear layers in float8, forward and backward. Weights and optimizer stay in high precision."""
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """How numbers are scaled: one scale per tensor (fastest), one per row (more accurate), or one per row with weight
    gradients in high precision (most accurate)."""
    filter_fqns: list[str] = Field(default_factory=list)
    """Layers and experts to keep in high precision: parts of their names, or patterns. "auto_filter_small_kn" keeps layers
    that are too small to run faster in float8, as measured on H100."""
    convert_head: bool = False
    """Also convert the last layer, which computes the logits."""
    convert_experts: bool = False
    """Also compute the products of experts in float8. Only for "rowwise_with_gw_hp"."""
    enable_fsdp_float8_all_gather: bool = False
    """Under FSDP, gather weights in float8, which halves the traffic. Only for "tensorwise"."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Compute the scales of all weights with one reduction after each step, instead of one per weight at each all-gather."""
    emulate: bool = False
    """Compute the same numbers in software, slowly, for tests and for studies of convergence."""


class MXSection(Section):
    section: ClassVar[str] = "mx"
    may_change: ClassVar[tuple[str, ...]] = ("emulate",)  # changes no number

    enable: bool = False
    """Compute linear layers in MXFP8: float8 with one scale per 32 numbers (OCP Microscaling Formats 1.0), or in NVFP4: 4
    bits with one scale per 16 numbers (arXiv 2509.25149)."""
    recipe_name: Literal["mxfp8_rceil", "mxfp8_floor", "mxfp8_rceil_wgrad_with_hp", "nvfp4", "nvfp4_wgrad_with_hp"] = (
        "mxfp8_rceil"
    )
    """The format, and in MXFP8 how scales are rounded: up, so that nothing overflows; or down, as in the OCP specification.
    With "wgrad_with_hp", weight gradients are computed in high precision."""
    filter_fqns: list[str] = Field(default_factory=list)
    """Layers and experts to keep in high precision: parts of their names, or patterns."""
    convert_head: bool = False
    """Also convert the last layer, which computes the logits."""
    convert_experts: bool = False
    """Also compute the products of experts in MXFP8. Only for "mxfp8_rceil_wgrad_with_hp"."""
    emulate: bool = False
    """Compute the same numbers in software, slowly, for tests and for studies of convergence."""


def float8_choices(context: JobContext[Float8Section]) -> Mapping[str, Sequence[Any]]:
    """Return whether to compute in float8. The key changes the numbers, so a plan tries it on request only."""
    return {} if context.config.section(MXSection).enable else {"float8.enable": (False, True)}


def float8_costs(context: JobContext[Float8Section]) -> Costs:
    """Return the type of the matmuls."""
    return Costs(matmul_type="fp8")


def mx_costs(context: JobContext[MXSection]) -> Costs:
    """Return the type of the matmuls."""
    return Costs(matmul_type="nvfp4" if context.section.recipe_name.startswith("nvfp4") else "mxfp8")
