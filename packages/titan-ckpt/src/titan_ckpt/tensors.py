"""A model's tensors by name, as a checkpoint calls them: ``model.<parameter>``, on any mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from titan_core.model.part import ModelPart

MODEL, OPTIMIZER = "model", "optimizer"


def model_tensors(parts: Sequence[ModelPart]) -> dict[str, Tensor]:
    """Parameters, and the buffers that are part of a model's state; a shared parameter once, under its first name."""
    tensors: dict[str, Tensor] = {}
    for part in parts:
        kept = part.module.state_dict().keys()
        for name, tensor in (*part.module.named_parameters(), *part.module.named_buffers()):
            if name in kept:
                tensors[f"{MODEL}.{name}"] = tensor.detach()
    return tensors


def buffer_names(parts: Sequence[ModelPart]) -> Iterator[str]:
    """What :func:`model_tensors` calls buffers."""
    return (f"{MODEL}.{name}" for part in parts for name, _ in part.module.named_buffers())
