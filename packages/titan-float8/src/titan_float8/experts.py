"""Selection of the modules of experts whose products are computed in float8."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from titan_core.api import Experts, GroupedLinear, ModelPart, Router, UserError, matches
from titan_float8.config import Float8Section
from titan_float8.grouped import MULTIPLE, Float8GroupedLinear
from titan_float8.layers import is_filtered

log = logging.getLogger(__name__)


def experts_of(part: ModelPart) -> dict[str, nn.Module]:
    """Return the modules of ``part`` that own parameters with a dimension of experts."""

    def holds_experts(path: str, module: nn.Module) -> bool:
        names = (name for name, _ in module.named_parameters(recurse=False))
        return any(isinstance(part.layout.rule(f"{path}.{name}"), Experts) for name in names)

    return {path: module for path, module in part.named_modules() if holds_experts(path, module)}


def convert_experts(part: ModelPart, section: Float8Section, filters: Sequence[str]) -> dict[str, nn.Module]:
    """Replace the products of the experts of ``part``; log which experts stay in high precision.

    Args:
        filters: experts to skip: parts of names, or patterns.

    Returns:
        The modules whose products were replaced.

    Raises:
        UserError: experts that no filter names cannot be converted.
    """
    experts = experts_of(part)
    if not section.convert_experts:
        log_experts(experts, "float8.convert_experts = false")
        return {}
    converted, kept = {}, {}
    for path, module in experts.items():
        if is_filtered(path, filters) or _is_exact(path, module, part):
            kept[path] = module
            continue
        products = [name for name, child in module.named_modules() if isinstance(child, GroupedLinear)]
        if problem := _problem(path, module, part, products):
            fix = f"add {path!r} to float8.filter_fqns, or set float8.convert_experts = false"
            raise UserError.one("float8.convert_experts = true", f"{path!r} {problem}", fix)
        for name in products:
            module.set_submodule(name, Float8GroupedLinear(section.emulate))
        converted[path] = module
    log_experts(kept, "float8.filter_fqns, or the model's layout")
    return converted


def log_experts(experts: Mapping[str, nn.Module], why: str) -> None:
    """Log which experts stay in high precision, if any do."""
    if experts:
        first, *others = experts
        more = f" and {len(others)} more" if others else ""
        log.info("experts in high precision (%s): %s%s", why, first, more)


def _is_exact(path: str, module: nn.Module, part: ModelPart) -> bool:
    """Whether the module computes in fp32 by the model's layout."""
    return any(matches(f"{path}.{name}", part.layout.exact) for name, _ in module.named_parameters(recurse=False))


def _problem(path: str, module: nn.Module, part: ModelPart, products: Sequence[str]) -> str | None:
    """Return why the products of a module of experts cannot be converted, or ``None``."""
    if not products:
        return "computes its products itself, not with a child module GroupedLinear, which could be replaced"
    for name, sides in _sides(path, module, part):
        if any(side % MULTIPLE for side in sides):
            return f"has weights {name!r} of {' x '.join(map(str, sides))}, and float8 needs multiples of {MULTIPLE}"
    return None


def _sides(path: str, module: nn.Module, part: ModelPart) -> Iterator[tuple[str, list[int]]]:
    """Yield the names and the sides of the weights of each expert: not of vectors, such as biases."""
    for name, parameter in module.named_parameters(recurse=False):
        rule = part.layout.rule(f"{path}.{name}")
        if isinstance(rule, Experts) and parameter.dim() == 3:
            yield name, [size for dim, size in enumerate(parameter.shape) if dim != rule.dim % 3]


def record_flops_of_experts(part: ModelPart, converted: Mapping[str, nn.Module], share: float) -> None:
    """Record that ``converted`` compute the fraction ``share`` of their three products in float8. Experts of blocks without
    a router that the layout names count as in high precision: how many of them a token uses is unknown.
    """
    for path, module in converted.items():
        if router := _router_beside(path, part):
            numel = sum(parameter.numel() for parameter in module.parameters() if parameter.dim() == 3)
            flops = 6.0 * numel * router.per_token / router.experts * share
            part.fill("titan_debug.flops", path, (torch.float8_e4m3fn, flops))


def _router_beside(path: str, part: ModelPart) -> Router | None:
    """Return the router of the block that contains the module ``path``."""
    block = ".".join(path.split(".")[: part.layout.blocks.count(".") + 2])
    names = (name for name, _ in part.named_modules() if name.startswith(f"{block}."))
    return next((router for name in names if (router := part.layout.router(name)) is not None), None)
