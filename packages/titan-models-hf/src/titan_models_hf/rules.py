"""How the parameters of a model of transformers may be sharded: from the library's plans for tensor parallelism."""

from __future__ import annotations

from typing import Any

from torch import nn

from titan_core.api import matches
from titan_models_hf import families, transformers_private as library
from titan_models_hf.trace import Trace

_STYLES = {"colwise": "column", "rowwise": "row"}


def rules_of(model: Any, architecture: str, trace: Trace) -> tuple[dict[str, str], list[str]]:
    """Return the name of a rule for each parameter, and the regions: modules whose linear layers divide the features among
    them. What the plans leave out, every rank computes in full."""
    plan = {**families.tensor_plan(architecture), **library.tensor_plan(model)}
    layers: dict[str, dict[str, str]] = {}
    for name, module in model.named_modules():
        style = next((style for pattern, style in plan.items() if matches(name, [pattern])), "")
        if isinstance(module, nn.Linear) and style in _STYLES:
            layers.setdefault(name.rpartition(".")[0], {})[name] = _STYLES[style]
    rules = {name: "replicate" for name, _ in model.named_parameters(remove_duplicate=False)}
    regions = [region for region, styles in layers.items() if set(styles.values()) == set(_STYLES.values())]
    for region in regions:
        for name, rule in layers[region].items():
            rules |= {f"{name}.{leaf}": rule for leaf, _ in model.get_submodule(name).named_parameters()}
        if region in trace.attentions and trace.attentions[region].sinks:
            rules |= {name: "shard 0" for name in rules if name == f"{region}.sinks"}
    return rules, regions
