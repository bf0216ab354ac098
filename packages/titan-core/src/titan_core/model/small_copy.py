"""A small copy of a model, with weights: the first block of each kind, and what surrounds the blocks."""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from titan_core.api import CausalAttention, ModelLayout, ModelPart, matches
from titan_core.api.parallel.model_part import PrunedModule
from titan_core.model.materialise import allocate, local_box
from titan_core.model.stand_in import replaced_blocks

_POSITIONS = 16
"""Least number of positions in a trial's sequence."""
_WINDOW = 5
"""Longest window in a trial, in positions: more than a rank's chunk of 16 positions under context parallelism."""


def small_copy(model: nn.Module, layout: ModelLayout, all_blocks: bool) -> nn.Module:
    """Return a copy of ``model``, which is on the meta device, with parameters of at least fp32.

    Args:
        all_blocks: whether to keep blocks that are built like an earlier one.
    """
    small = copy.deepcopy(model, {} if all_blocks else replaced_blocks(model, layout))
    half = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in small.parameters())
    return small.float() if half else small


def short_windows(copy: nn.Module, layout: ModelLayout) -> ModelLayout:
    """Shorten the windows of a copy's attention, so that a few positions reach beyond them.

    Returns:
        The layout of the copy.
    """
    for module in copy.modules():
        if isinstance(module, CausalAttention) and module.window is not None:
            module.window = min(module.window, _WINDOW)
    shortened = {
        pattern: replace(mixer, window=min(mixer.window, _WINDOW))
        for pattern, mixer in layout.mixers.items()
        if mixer.window is not None and all(_has_windows(copy, pattern))
    }
    return replace(layout, mixers={**layout.mixers, **shortened})


def _has_windows(copy: nn.Module, pattern: str) -> Iterator[bool]:
    """Yield for each module of ``pattern`` whether its window can be shortened."""
    for name, module in copy.named_modules():
        if matches(name, [pattern]):
            yield isinstance(module, CausalAttention | PrunedModule)


def positions_to_try(layout: ModelLayout) -> int:
    """Return the least length of a trial's sequences: that of the mixer that needs most."""
    return max([_POSITIONS, *(mixer.trial_positions or 0 for mixer in layout.mixers.values())])


def draw_weights(part: ModelPart, device: torch.device, seed: int) -> None:
    """Allocate an undivided part, and draw its weights on ``device``: equal on all ranks, of the magnitude of trained
    weights, and for each parameter of another scale."""
    module = part.module
    allocate(part, device)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            generator = torch.Generator(device=device).manual_seed(zlib.crc32(name.encode()) + seed * 2**32)
            parameter.copy_(_values(parameter, generator))
        for name, buffer in module.named_buffers():
            compute = next(compute for pattern, compute in part.layout.buffers.items() if matches(name, [pattern]))
            buffer.copy_(compute())


def _values(like: Tensor, generator: torch.Generator) -> Tensor:
    shape, device = like.shape, generator.device
    scale = 2.0 ** (torch.rand((), generator=generator, device=device) - 0.5)
    if like.dim() < 2:
        values = 0.5 + torch.rand(shape, generator=generator, device=device)
    else:
        fan = min(like.numel() // max(1, shape[0]), max(shape[-2:]))
        values = torch.randn(shape, generator=generator, device=device) / math.sqrt(max(1, fan))
    values = values * scale
    return torch.polar(values.abs(), 6.0 * values) if like.is_complex() else values


def copy_weights(part: ModelPart, whole: nn.Module, device: torch.device) -> None:
    """Allocate a divided part, and copy this rank's shards of the weights of ``whole``, which has them all."""
    allocate(part, device)
    weights, buffers = named_parameters(whole), dict(whole.named_buffers())
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            local, offset = local_box(parameter)
            local.copy_(box_of(weights[name], local, offset))
        for name, buffer in part.module.named_buffers():
            buffer.copy_(buffers[name])


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters, a shared one under each of its names."""
    return dict(module.named_parameters(remove_duplicate=False))


def box_of(whole: Tensor, local: Tensor, offset: tuple[int, ...]) -> Tensor:
    """Return the elements of ``whole`` that ``local`` holds, which begin at ``offset``."""
    return whole[tuple(slice(first, first + size) for first, size in zip(offset, local.shape, strict=True))]
