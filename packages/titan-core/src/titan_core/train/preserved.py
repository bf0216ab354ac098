"""Forward passes that leave no trace: what observers and validation compute changes nothing that training depends on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from titan_core.lifecycle import same_generators
from titan_core.model.part import ModelPart


@contextmanager
def preserved_state(parts: Sequence[ModelPart]) -> Iterator[None]:
    """On exit, gradients, buffers, training modes and random generators are bit for bit what they were on entry, whatever
    the forward passes in between did, and parameters that were gathered for them are sharded again.

    Gradients are kept by reference, so they must not be changed in place. A schedule of pipeline stages drops them when it
    switches between training and evaluation (torch 2.11 to 2.15); modules may count their calls or keep running statistics.
    """
    modules = [module for part in parts for module in part.module.modules()]
    gradients = [(parameter, parameter.grad) for part in parts for parameter in part.module.parameters()]
    modes = [(module, module.training) for module in modules]
    buffers = [
        (module, name, buffer, buffer.clone(), buffer._version)
        for module in modules
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        with same_generators():
            yield
    finally:
        for part in parts:
            for finish in part.after_evaluation:
                finish()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, buffer, copy, version in buffers:
                setattr(module, name, buffer)
                if buffer._version != version:
                    buffer.copy_(copy)
