"""Materialisation: each rank allocates and fills its own shards, never more."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_core.api import Loaded, ModelPart, UserError, matches
from titan_core.api.plugins.errors import shown
from titan_core.model.random_values import fill
from titan_core.toolkit.simulation import current_simulation, has_values
from titan_core.torch_private import global_offset


def materialise(part: ModelPart, device: torch.device, seed: int) -> None:
    """Allocate the part's parameters and buffers on ``device`` and fill them with their initial values."""
    module, layout = part.module, part.layout
    allocate(part, device)
    with torch.no_grad():
        for name, parameter in module.named_parameters() if has_values() else ():
            name = part.copies.get(name, name)
            value = layout.initial_value(name)
            assert value is not None, f"layout_check rejects parameters without an initial value, but {name} has none"
            local, offset = local_box(parameter)
            fill(local, value, seed=seed, name=name, global_shape=parameter.shape, offset=offset)
        for name, buffer in module.named_buffers():
            compute = next(compute for pattern, compute in layout.buffers.items() if matches(name, [pattern]))
            found = compute()
            if not isinstance(found, torch.Tensor):
                where, why = f"the layout's buffer {name!r}", f"its function returned {shown(found)}, which is no tensor"
                raise UserError.one(where, why, "fix the model plugin")
            buffer.copy_(found)


def not_loaded(parts: Iterable[ModelPart]) -> UserError | None:
    """Return the error that names a parameter of this rank which must be loaded and has not been."""
    for part in parts if current_simulation() is None else ():
        for name, parameter in part.module.named_parameters():
            value = part.layout.initial_value(part.copies.get(name, name))
            if isinstance(value, Loaded) and local_box(parameter)[0].isnan().any():
                fix = "start from weights that have it: set model.from_pretrained"
                return UserError.one(f"parameter {name!r}", f"has no initial value: {value.why}", fix)
    return None


def allocate(part: ModelPart, device: torch.device) -> None:
    """Allocate the part's parameters and buffers, without values."""
    module = part.module
    module.to_empty(device=part.parameters_on or device)
    part.retie()
    if part.parameters_on is not None:
        for owner in module.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                setattr(owner, name, buffer.to(device))


def local_box(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's shard of ``tensor`` and the global index of its first element."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.dim()
    return tensor.to_local(), global_offset(tensor)
