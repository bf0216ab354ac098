"""Under tensor parallelism, casts the input that several layers share to float8 before the all-gather instead of after it.
This halves the traffic and casts only once. Needs one scale per tensor: scales of rows would have to be gathered too."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import GemmInputRole

from titan_core.api import Column, ModelPart, matches


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
            part.fill("titan_parallel.region_casts", region, _cast(layer, config, ranks))


def _cast(layer: Float8Linear, config: Float8LinearConfig, ranks: DeviceMesh) -> Callable[[Tensor], Tensor]:
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
