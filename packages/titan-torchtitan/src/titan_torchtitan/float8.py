"""``model.converters``, ``[float8]`` and ``[mx]``."""

from __future__ import annotations

from typing import Any, Final

from titan_torchtitan.keys import LATE
from titan_torchtitan.outcome import ImportOutcome

_FLOAT8: Final = frozenset({"float8", "quantize.dense.float8", "quantize.linear.float8"})
_MX: Final = frozenset({"mx", "quantize.dense.mx", "quantize.linear.mx"})
_EXPERTS: Final = frozenset(
    {"quantize.moe.float8", "quantize.moe.mx", "quantize.grouped_mm.float8", "quantize.grouped_mm.mx"}
)
_MX_RECIPES: Final[dict[str, dict[str, Any]]] = {
    "mxfp8": {"mx.recipe_name": "mxfp8_floor"},
    "mxfp8_cublas": {"mx.recipe_name": "mxfp8_floor"},
    "mxfp8_cublas_rceil": {"mx.recipe_name": "mxfp8_rceil"},
    "mxfp8_rceil": {"mx.recipe_name": "mxfp8_rceil"},
    "mxfp8_rceil_wgrad_with_hp": {"mx.recipe_name": "mxfp8_rceil_wgrad_with_hp"},
    "mxfp8_emulated": {"mx.recipe_name": "mxfp8_floor", "mx.emulate": True},
}
"""torchao's recipes; "cublas" names the kernel, and rounding is down unless the name says otherwise."""
_HEAD: Final = "output"
_CONVERTERS = "model.converters"
_GATHER = "float8.enable_fsdp_float8_all_gather"
_PRECOMPUTE = "float8.precompute_float8_dynamic_scale_for_fsdp"


def import_low_precision(outcome: ImportOutcome) -> None:
    """Import the formats of linear layers."""
    old = outcome.old
    converters = old.get(_CONVERTERS, [])
    enabled: dict[str, bool] = {}
    unknown = [name for name in converters if name not in _FLOAT8 | _MX | _EXPERTS]
    for section, names in (("float8", _FLOAT8), ("mx", _MX)):
        if old.has(_CONVERTERS):
            enabled[section] = not names.isdisjoint(converters)
    if unknown:
        known = [name for name in converters if name not in unknown]
        outcome.refuse(
            _CONVERTERS, f"Titan has no {', '.join(map(repr, unknown))}: a plugin can convert layers (docs/plugins.md)"
        )
        for section, names in (("float8", _FLOAT8), ("mx", _MX)):
            if not names.isdisjoint(known):
                outcome.default(f"{section}.enable", True, _CONVERTERS)
    else:
        new = {f"{section}.enable": True for section, on in enabled.items() if on}
        if new or not converters:
            outcome.set(_CONVERTERS, new or {"float8.enable": False})
        outcome.ignore("the model has no experts", _CONVERTERS)
    _float8(outcome, enabled.get("float8", False))
    _mx(outcome, enabled.get("mx", False))
    outcome.ignore(
        "the model has no experts", "float8.moe_fqns_prototype", "float8.float8_rowwise_for_moe", "mx.moe_fqns_prototype",
        "mx.moe_recipe_name",
    )  # fmt: skip
    outcome.ignore("affects speed only: Titan computes the loss in chunks", "liger_kernel.enable_fused_linear_cross_entropy")


def _float8(outcome: ImportOutcome, enabled: bool) -> None:
    old = outcome.old
    recipe = old.get("float8.recipe_name") or "tensorwise"
    if old.get("float8.recipe_name"):
        outcome.keep("float8.recipe_name")
    outcome.ignore("not set", "float8.recipe_name")
    if old.get(_GATHER) and recipe != "tensorwise":
        outcome.ignore(f'no effect with recipe_name = "{recipe}", which has many scales per weight', _GATHER)
    gathers = old.get(_GATHER, False) and recipe == "tensorwise"
    outcome.keep(_GATHER)
    if old.get(_PRECOMPUTE) and not gathers:
        outcome.ignore("no effect unless weights are gathered in float8", _PRECOMPUTE)
    outcome.keep(_PRECOMPUTE, "float8.emulate")
    outcome.ignore(
        "affects memory only: Titan saves no float8 weights for backward", "float8.force_recompute_fp8_weight_in_bwd"
    )
    for name in ("input", "weight", "grad_output"):
        key = f"float8.scaling_type_{name}"
        if enabled and old.get(key, "dynamic") != "dynamic":
            outcome.refuse(key, "torchao removed delayed scaling: scales are dynamic")
        outcome.ignore("scales are dynamic" if enabled else "float8 is off", key)
    _filters(outcome, "float8", enabled, old.generation >= LATE)


def _mx(outcome: ImportOutcome, enabled: bool) -> None:
    old = outcome.old
    recipe = str(old.get("mx.recipe_name", "mxfp8_cublas"))
    if recipe in _MX_RECIPES:
        outcome.set("mx.recipe_name", _MX_RECIPES[recipe])
        if enabled and not old.has("mx.recipe_name"):
            outcome.default("mx.recipe_name", "mxfp8_floor", "TorchTitan's default mxfp8_cublas rounds scales down")
    elif enabled:
        outcome.refuse("mx.recipe_name", "Titan has MXFP8 only, not this recipe of torchao: set mx.recipe_name")
    outcome.ignore("MXFP8 is off", "mx.recipe_name")
    outcome.ignore(
        "affects speed only: Titan selects the kernel",
        "mx.mxfp8_dim1_cast_kernel_choice",
        "mx.use_fp8_dim1_cast_triton_kernel",
    )
    _filters(outcome, "mx", enabled, False)


def _filters(outcome: ImportOutcome, section: str, enabled: bool, head_by_default: bool) -> None:
    """Titan keeps the head in high precision unless ``convert_head`` is set; TorchTitan converted it unless a filter matched
    its name."""
    old, key, convert = outcome.old, f"{section}.filter_fqns", f"{section}.convert_head"
    if not old.has(key):
        if enabled and head_by_default:
            outcome.default(convert, True, "TorchTitan's default converts the head")
    elif any(name in _HEAD for name in old.get(key)):
        outcome.set(key, {key: old.get(key)})
    else:
        outcome.set(key, {key: old.get(key), convert: True}, "TorchTitan converts the head too, unless a filter names it")
