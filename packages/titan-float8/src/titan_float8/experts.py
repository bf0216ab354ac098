"""Selection of the modules of experts whose products are computed in low precision."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from titan_core.api import Experts, ModelPart, Router, Shard, UserError, matches
from titan_float8.config import Float8Section, MXSection
from titan_float8.grouped import LowPrecisionGroupedLinear
from titan_float8.layers import is_filtered
from titan_nn.experts import GroupedLinear

log = logging.getLogger(__name__)


def experts_of(part: ModelPart) -> dict[str, nn.Module]:
    """Return the modules of ``part`` that own parameters with a dimension of experts."""

    def holds_experts(path: str, module: nn.Module) -> bool:
        names = (name for name, _ in module.named_parameters(recurse=False))
        return any(isinstance(part.layout.rule(f"{path}.{name}"), Experts) for name in names)

    return {path: module for path, module in part.named_modules() if holds_experts(path, module)}


def convert_experts(
    part: ModelPart,
    section: Float8Section | MXSection,
    filters: Sequence[str],
    product: type[LowPrecisionGroupedLinear],
    ranks: int,
) -> dict[str, nn.Module]:
    """Replace the products of the experts of ``part``; log which experts stay in high precision.

    Args:
        section: its key ``convert_experts`` says whether to.
        filters: experts to skip: parts of names, or patterns.
        product: what computes products instead.
        ranks: the degree of tensor parallelism, which may divide experts.

    Returns:
        The modules whose products were replaced.

    Raises:
        UserError: experts that no filter names cannot be converted.
    """
    experts, name = experts_of(part), section.section
    if not section.convert_experts:
        log_experts(experts, f"{name}.convert_experts = false")
        return {}
    converted, kept = {}, {}
    for path, module in experts.items():
        if is_filtered(path, filters) or _is_exact(path, module, part):
            kept[path] = module
            continue
        products = [child_path for child_path, child in module.named_modules() if isinstance(child, GroupedLinear)]
        if problem := _problem(path, module, part, products, product, ranks):
            fix = f"add {path!r} to {name}.filter_fqns, or set {name}.convert_experts = false"
            raise UserError.one(f"{name}.convert_experts = true", f"{path!r} {problem}", fix)
        for child_path in products:
            module.set_submodule(child_path, product(section.emulate))
        converted[path] = module
    log_experts(kept, f"{name}.filter_fqns, or the model's layout")
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


def _problem(
    path: str,
    module: nn.Module,
    part: ModelPart,
    products: Sequence[str],
    product: type[LowPrecisionGroupedLinear],
    ranks: int,
) -> str | None:
    """Return why the products of a module of experts cannot be converted, or ``None``."""
    if not products:
        return "computes its products itself, not with a child module GroupedLinear, which could be replaced"
    for name, sides, shared in _sides(path, module, part):
        needed = {dim: product.multiple * (ranks if dim == shared else 1) for dim in sides}
        if any(side % needed[dim] for dim, side in sides.items()):
            why = f"{product.format} needs multiples of {product.multiple}"
            if shared is not None and ranks > 1:
                each = f"{product.multiple} x tensor_parallel_degree = {needed[shared]}"
                why += f", and of {each} where tensor parallelism divides it ({sides[shared]})"
            return f"has weights {name!r} of {' x '.join(map(str, sides.values()))}, and {why}"
    return None


def _sides(path: str, module: nn.Module, part: ModelPart) -> Iterator[tuple[str, dict[int, int], int | None]]:
    """Yield the names of the weights of the experts (not of vectors, such as biases), the sides of each expert's by their
    dimensions, and the dimension that tensor parallelism divides, if it does."""
    for name, parameter in module.named_parameters(recurse=False):
        rule = part.layout.rule(f"{path}.{name}")
        if isinstance(rule, Experts) and parameter.dim() == 3:
            sides = {dim: size for dim, size in enumerate(parameter.shape) if dim != rule.dim % 3}
            yield name, sides, rule.within.dim % 3 if isinstance(rule.within, Shard) else None


def record_flops_of_experts(part: ModelPart, converted: Mapping[str, nn.Module], share: float) -> None:
    """Record that ``converted`` compute the fraction ``share`` of their three products in 8 bits. Experts of blocks without
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
