"""Config sections of titan-float8. Names follow TorchTitan's TOML of 2025 where it had them."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from titan_core.api.section import Section

AUTO_FILTER = "auto_filter_small_kn"


class Float8Section(Section):
    section: ClassVar[str] = "float8"
    may_change: ClassVar[tuple[str, ...]] = ("emulate",)  # the same numbers

    enable: bool = False
    """Compute linear layers in float8, forward and backward. Weights and optimizer stay in high precision."""
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """How numbers are scaled: one scale a tensor (fastest), one a row (more exact), or one a row with the gradients of
    weights in high precision (most exact)."""
    filter_fqns: list[str] = Field(default_factory=list)
    """Layers to leave in high precision: parts of their names, or patterns. "auto_filter_small_kn" leaves those that are too
    small to gain (by measurements on H100)."""
    convert_head: bool = False
    """Convert the last layer too, which gives the logits."""
    enable_fsdp_float8_all_gather: bool = False
    """Under FSDP, gather weights in float8, which halves what is sent ("tensorwise" alone)."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Find the scales of all weights by one reduction after each step, instead of one for each when it is gathered."""
    emulate: bool = False
    """The same numbers without the hardware, slowly: for tests, and to study convergence."""


class MXSection(Section):
    section: ClassVar[str] = "mx"
    may_change: ClassVar[tuple[str, ...]] = ("emulate",)  # the same numbers

    enable: bool = False
    """Compute linear layers in MXFP8: float8 with a scale for each 32 numbers (OCP Microscaling Formats 1.0)."""
    recipe_name: Literal["mxfp8_rceil", "mxfp8_floor", "mxfp8_rceil_wgrad_with_hp"] = "mxfp8_rceil"
    """How scales are rounded: up, so that nothing overflows, or down as the OCP specification has it; or up with the
    gradients of weights in high precision."""
    filter_fqns: list[str] = Field(default_factory=list)
    """Layers to leave in high precision: parts of their names, or patterns."""
    convert_head: bool = False
    """Convert the last layer too, which gives the logits."""
    emulate: bool = False
    """The same numbers without the hardware, slowly: for tests, and to study convergence."""
