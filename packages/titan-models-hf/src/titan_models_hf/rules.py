"""How the parameters of a model of transformers may be sharded: from the library's plans for tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from titan_core.api import matches
from titan_models_hf import families, transformers_private as library
from titan_models_hf.fused import FusedLinear
from titan_models_hf.recurrent.gated_delta_net import GatedDeltaNet
from titan_models_hf.recurrent.mamba import Mamba
from titan_models_hf.trace import Trace

_STYLES = {"colwise": "column", "rowwise": "row"}
_GATHERED = {**_STYLES, "colwise_gather_output": "column", "rowwise_split_input": "row"}
"""Styles beside a fused layer, whose outputs the library cannot divide, or beside a norm over the features of all ranks."""


def rules_of(model: Any, architecture: str, trace: Trace) -> tuple[dict[str, str], list[str]]:
    """Return the name of a rule for each parameter, and the regions: modules whose linear layers divide the features among
    them, and attentions that every rank computes for all heads. What the plans leave out, every rank computes in full."""
    plan = {**families.tensor_plan(architecture), **library.tensor_plan(model)}
    layers: dict[str, dict[str, str]] = {}
    for name, module in model.named_modules():
        style = next((style for pattern, style in plan.items() if matches(name, [pattern])), "")
        region = name.rpartition(".")[0]
        styles = _GATHERED if _joins(model.get_submodule(region)) else _STYLES
        if isinstance(module, nn.Linear | FusedLinear) and style in styles:
            layers.setdefault(region, {})[name] = styles[style]
    rules = {name: "replicate" for name, _ in model.named_parameters(remove_duplicate=False)}
    regions = [
        region
        for region, found in layers.items()
        if set(found.values()) == {"column", "row"} and region not in trace.flat  # whose sequences cannot be gathered
    ]
    for name, module in model.named_modules():
        if isinstance(module, GatedDeltaNet | Mamba):
            layers.pop(name, None)  # the library's plan is that of its own module
            regions = [*(region for region in regions if region != name), name]
            rules |= {f"{name}.{leaf}": rule for leaf, rule in module.rules().items()}
    for region in regions:
        for name, rule in layers.get(region, {}).items():
            rules |= {f"{name}.{leaf}": rule for leaf, _ in model.get_submodule(name).named_parameters()}
        rules |= _norms(model, region, layers.get(region, {}))
        if region in trace.attentions and trace.attentions[region].sinks:
            rules |= {name: "shard 0" for name in rules if name == f"{region}.sinks"}
    return rules, regions + [name for name in trace.attentions if not _within(name, regions)]


def _joins(region: nn.Module) -> bool:
    return any(isinstance(child, FusedLinear) or "Norm" in type(child).__name__ for child in region.children())


def _norms(model: Any, region: str, layers: Mapping[str, str]) -> dict[str, str]:
    """Return the rules of norms over all features of a layer that is divided over its output features."""
    columns = [model.get_submodule(name) for name, rule in layers.items() if rule == "column"]
    widths = {layer.out_features for layer in columns if isinstance(layer, nn.Linear)}
    return {
        f"{region}.{name}.{leaf}": "norm"
        for name, module in model.get_submodule(region).named_modules()
        if "Norm" in type(module).__name__
        for leaf, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 1 and parameter.shape[0] in widths
    }


def _within(name: str, regions: list[str]) -> bool:
    return any(name == region or name.startswith(f"{region}.") for region in regions)
