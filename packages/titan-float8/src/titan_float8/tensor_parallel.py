"""float8 under tensor parallelism, with one scale per tensor.

The input that several layers share is cast before the all-gather instead of after it, which halves the traffic and casts
only once. A tensor whose features are sharded has the scale of the whole tensor, so that a layer computes the same float8
numbers on any mesh. Scales of rows are powers of two, with which numbers are rounded alike; they would have to be gathered
too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchao.float8 import Float8LinearConfig
from torchao.float8.config import CastConfig
from torchao.float8.distributed_utils import tensor_already_casted_to_fp8
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig, hp_tensor_and_scale_to_float8
from torchao.float8.float8_utils import tensor_to_scale

from titan_core.api import Column, ModelPart, Row, matches


def cast_gathered_inputs(part: ModelPart, converted: Collection[str], config: Float8LinearConfig, ranks: DeviceMesh) -> None:
    """Cast the input of each region whose column-sharded layers are all ``converted``.

    Args:
        ranks: the ranks of tensor parallelism, whose positions have one scale.
    """
    layout = part.layout
    for region, module in part.named_modules():
        if not matches(region, layout.regions):
            continue
        names = [f"{region}.{name}" for name, _ in module.named_modules()]
        columns = [name for name in names if isinstance(layout.rule(f"{name}.weight"), Column)]
        if columns and all(name in converted for name in columns):
            layer = part.module.get_submodule(columns[0])
            assert isinstance(layer, Float8Linear)
            part.fill("titan_parallel.region_casts", region, _cast_shared(layer, config, ranks))


def _cast_shared(layer: Float8Linear, config: Float8LinearConfig, ranks: DeviceMesh) -> Callable[[Tensor], Tensor]:
    def cast(hidden: Tensor) -> Tensor:
        result: Tensor = hp_tensor_to_float8_dynamic(
            hidden,
            config.cast_config_input.target_dtype,
            layer.linear_mm_config,
            reduce_amax=True,
            gemm_input_role=GemmInputRole.INPUT,
            device_mesh=ranks,
        )
        return result

    return cast


def scale_over_ranks(part: ModelPart, converted: Collection[str], ranks: DeviceMesh) -> None:
    """Make those ``converted`` layers whose weight tensor parallelism shards scale over ``ranks``."""
    for name in converted:
        rule = part.layout.rule(f"{name}.weight")
        by_output = isinstance(rule, Column) or name == part.layout.head[-1]
        if by_output or isinstance(rule, Row):
            layer: Any = part.module.get_submodule(name)
            assert type(layer) is Float8Linear
            layer.__class__ = ScaledOverRanks
            layer.ranks, layer.by_output = ranks, by_output


class ScaledOverRanks(Float8Linear):  # type: ignore[misc]  # torchao has no types
    """A float8 layer that computes with this rank's features of its weight."""

    ranks: DeviceMesh
    by_output: bool
    """Whether the output features are sharded, otherwise the input features."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute what ``Float8Linear`` does, with the scales of all ranks."""
        output: Tensor = _Matmul.apply(input, self.weight, self.config, self.linear_mm_config, self.ranks, self.by_output)
        return output if self.bias is None else output + self.bias.to(output.dtype)


@torch.compiler.allow_in_graph
class _Matmul(torch.autograd.Function):
    """``hidden @ weight.t()``. Backward casts both again, with the same scales; FSDP can free the weight meanwhile."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        config: Float8LinearConfig,
        matmuls: LinearMMConfig,
        ranks: DeviceMesh,
        by_output: bool,
    ) -> Tensor:
        ctx.config, ctx.matmuls, ctx.ranks = config, matmuls, ranks if by_output else None
        input_scale = _scale(hidden, config.cast_config_input, None if by_output else ranks)
        weight_scale = _scale(weight, config.cast_config_weight, ranks)
        ctx.save_for_backward(hidden, weight, input_scale, weight_scale)
        low_input = _cast(hidden, input_scale, config.cast_config_input, matmuls, GemmInputRole.INPUT)
        low_weight = _cast(weight, weight_scale, config.cast_config_weight, matmuls, GemmInputRole.WEIGHT)
        output = torch.mm(low_input.reshape(-1, hidden.shape[-1]), low_weight.t())
        return output.reshape(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, input_scale, weight_scale = ctx.saved_tensors
        config, matmuls = ctx.config, ctx.matmuls
        gradient = gradient.reshape(-1, gradient.shape[-1])
        scale = _scale(gradient, config.cast_config_grad_output, ctx.ranks)
        low = _cast(gradient, scale, config.cast_config_grad_output, matmuls, GemmInputRole.GRAD_OUTPUT)
        low_weight = _cast(weight, weight_scale, config.cast_config_weight, matmuls, GemmInputRole.WEIGHT)
        low_input = _cast(hidden, input_scale, config.cast_config_input, matmuls, GemmInputRole.INPUT)
        to_input = torch.mm(low, low_weight).reshape(hidden.shape)
        to_weight = torch.mm(low.t(), low_input.reshape(-1, hidden.shape[-1]))
        return to_input, to_weight, None, None, None, None


def _scale(tensor: Tensor, cast: CastConfig, ranks: DeviceMesh | None) -> Tensor | None:
    """Return the scale of ``tensor``; ``None`` if it is in float8 already.

    Args:
        ranks: those that hold the rest of the tensor; ``None``: this rank has all of it.
    """
    if tensor_already_casted_to_fp8(tensor):
        return None
    return tensor_to_scale(tensor, cast.target_dtype, reduce_amax=ranks is not None, device_mesh=ranks)


def _cast(tensor: Tensor, scale: Tensor | None, cast: CastConfig, matmuls: LinearMMConfig, role: GemmInputRole) -> Tensor:
    """Return ``tensor`` in float8."""
    if scale is None:
        return tensor
    return hp_tensor_and_scale_to_float8(tensor, scale, cast.target_dtype, matmuls, role)
