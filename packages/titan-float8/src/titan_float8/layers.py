"""Selects the linear layers to convert, and fills the slots of other plugins for them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from titan_core.api import ModelLayout, ModelPart, UserError, matches
from titan_core.api.parallel.model_part import PrunedModule
from titan_float8.config import MXSection


def linear_layers(
    modules: Iterable[tuple[str, nn.Module]], layout: ModelLayout, filters: Sequence[str], convert_head: bool, multiple: int
) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers to convert, with their names: none that compute in fp32 by the model's layout.

    Args:
        modules: those of the model, with their names.
        filters: layers to skip: parts of names, or patterns.
        convert_head: whether to convert the layer that computes the logits.
        multiple: skips layers unless both dimensions of the weight are multiples of this number.

    Raises:
        UserError: another transform has given a layer a parameter, which the conversion would drop.
    """
    head = () if convert_head else layout.head[-1:]
    for name, module in modules:
        if not isinstance(module, nn.Linear) or any(name == last or name.startswith(f"{last}.") for last in head):
            continue
        if is_filtered(name, filters) or matches(f"{name}.weight", layout.exact):
            continue
        if all(size % multiple == 0 for size in module.weight.shape):
            if added := {leaf for leaf, _ in module.named_parameters(recurse=False)} - {"weight", "bias"}:
                why = f"has the parameter {min(added)!r} of another transform, which a converted layer would drop"
                raise UserError.one(
                    f"linear layer {name!r}", why, "switch that transform off, or name the layer in filter_fqns"
                )
            yield name, module


def is_filtered(name: str, filters: Sequence[str]) -> bool:
    """Whether one of ``filters``, parts of names or patterns, names a module."""
    return any(text in name for text in filters) or matches(name, filters)


def require_matches(part: ModelPart, filters: Sequence[str], section: str, others: Collection[str] = ()) -> None:
    """Require every filter to match a layer. Stages of a pipeline are not checked: another stage may contain the layer.

    Args:
        others: names of modules that filters may name as well as linear layers.

    Raises:
        UserError: A filter matches no layer.
    """
    if any(isinstance(module, PrunedModule) for module in part.module.modules()):
        return
    names = [name for name, module in part.named_modules() if isinstance(module, nn.Linear)]
    for pattern in filters:
        if not any(is_filtered(name, [pattern]) for name in (*names, *others)):
            why = "matches no linear layer of the model"
            fix = f"use names such as {names[0]!r}, or remove it"
            raise UserError.one(f"{section}.filter_fqns: {pattern!r}", why, fix)


def require_some(found: Collection[object], part: ModelPart, section: str) -> None:
    """Require at least one converted layer in a part that has blocks.

    Raises:
        UserError: No layer is converted.
    """
    if not found and part.blocks():
        raise UserError.one(
            f"[{section}]",
            "converts no layer of the model: all are filtered, or their sizes are not the multiples that the format needs",
            f"change {section}.filter_fqns, or set {section}.enable = false",
        )


def round_as_eager(part: ModelPart, layers: Iterable[str]) -> None:
    """Make compiled code round intermediate results to bf16 wherever eager code does.

    Fused code would keep them in fp32. With one scale per row, training then ends in NaN
    (https://github.com/pytorch/pytorch/issues/150859).
    """
    for name in layers:
        part.fill("titan_parallel.compiler_options", name, {"emulate_precision_casts": True})


def record_flops(
    part: ModelPart, layers: Mapping[str, nn.Linear], share: float, dtype: torch.dtype = torch.float8_e4m3fn
) -> None:
    """Record that each of ``layers`` computes the fraction ``share`` of its three matmuls in ``dtype``."""
    for name, layer in layers.items():
        part.fill("titan_debug.flops", name, (dtype, 6.0 * layer.weight.numel() * share))


class ConvertedLinear(nn.Linear):
    """A linear layer in a format with scales of blocks."""

    emulate: bool
    weight_gradient_in_high_precision: bool

    @classmethod
    def from_linear(cls, layer: nn.Linear, section: MXSection) -> Self:
        """Return a layer that shares the parameters of ``layer``."""
        with torch.device("meta"):
            converted = cls(layer.in_features, layer.out_features, bias=False)
        converted.weight, converted.bias = layer.weight, layer.bias
        converted.emulate = section.emulate
        converted.weight_gradient_in_high_precision = section.recipe_name.endswith("wgrad_with_hp")
        return converted

    def forward(self, input: Tensor) -> Tensor:
        """Compute what :class:`torch.nn.Linear` does."""
        output = self._matmul(input, self.weight)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def _matmul(self, input: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError  # abstract: each format multiplies in its own way
