"""Low-rank adapters of linear layers (LoRA; Hu et al., arXiv 2106.09685): ``y = W x + (alpha / rank) B A x``."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from titan_core.api import (
    Column,
    Constant,
    ModelLayout,
    ModelPart,
    ModelTrial,
    Problem,
    Replicate,
    Row,
    Shard,
    TrainingContext,
    Uniform,
    UserError,
    matches,
)
from titan_lora.config import LoRASection


def check(model: nn.Module, trial: ModelTrial, context: TrainingContext[LoRASection]) -> Iterable[Problem]:
    for pattern in context.section.targets:
        if not adapted(model, context.job.model.layout, [pattern]):
            yield context.config.problem(
                "lora.targets", f"{pattern!r} matches no linear layer of blocks", "see titan model show"
            )
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if trained and context.job.trains:
        yield Problem("training.freeze", f"leaves {trained[0]} to train beside the adapters", 'set training.freeze = ["*"]')


def adapted(model: nn.Module, layout: ModelLayout, targets: list[str]) -> dict[str, nn.Linear]:
    """Return the linear layers of blocks that match ``targets``, by name."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {name: one for name, one in linears.items() if name.startswith(f"{layout.blocks}.") and matches(name, targets)}


def apply(part: ModelPart, context: TrainingContext[LoRASection]) -> ModelPart:
    """Add ``lora_A``, ``[rank, in]``, and ``lora_B``, ``[out, rank]``, to each layer. The input of a layer is sharded by
    features where its weight's rule is Row, and its output where that is Column: so are A and B."""
    section, layout = context.section, part.layout
    rules: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, module in adapted(part.module, layout, section.targets).items():
        if type(module) is not nn.Linear:
            why = f"computes as {type(module).__name__}, and an adapter needs a layer in full precision"
            raise UserError.one(
                f"linear layer {name!r}", why, "switch that precision off, or leave the layer out of lora.targets"
            )
        rule, (outputs, inputs) = layout.rule(f"{name}.weight"), module.weight.shape
        module.lora_A = nn.Parameter(module.weight.new_empty(section.rank, inputs))
        module.lora_B = nn.Parameter(module.weight.new_empty(outputs, section.rank))
        module.register_forward_hook(partial(add_adapter, section.alpha / section.rank))
        rules[f"{name}.lora_A"] = Shard(1) if isinstance(rule, Row) else Replicate()
        rules[f"{name}.lora_B"] = Shard(0) if isinstance(rule, Column) else Replicate()
        values[f"{name}.lora_A"] = Uniform(-(inputs**-0.5), inputs**-0.5)
        values[f"{name}.lora_B"] = Constant(0.0)
    part.layout = replace(layout, rules={**rules, **layout.rules}, parameters={**values, **layout.parameters})
    return part


def add_adapter(scale: float, module: Any, arguments: tuple[Tensor], output: Tensor) -> Tensor:
    """Add the adapter's output to a layer's; a forward hook. Under Row both are partial sums: a later hook, of
    tensor parallelism, adds them up."""
    return output + scale * F.linear(F.linear(arguments[0], module.lora_A), module.lora_B)
