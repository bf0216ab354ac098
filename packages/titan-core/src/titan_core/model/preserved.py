"""Forward passes that leave no trace: what observers and validation compute changes nothing that training depends on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor

from titan_core.api.model_part import ModelPart
from titan_core.api.tools.random_state import same_generators
from titan_core.api.torch_private import version_of


@contextmanager
def preserved_state(parts: Sequence[ModelPart]) -> Iterator[None]:
    """:func:`preserved_module` for every part; parameters that were gathered for forward passes are sharded again."""
    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(preserved_module(part.module))
        try:
            yield
        finally:
            for part in parts:
                for finish in part.after_evaluation:
                    finish()


@contextmanager
def preserved_module(model: nn.Module) -> Iterator[None]:
    """On exit, gradients, buffers, training modes and random generators are bit for bit what they were on entry, whatever
    the forward passes in between did.

    Gradients are kept by reference, so they must not be changed in place. A schedule of pipeline stages drops them when it
    switches between training and evaluation (torch 2.11 to 2.15); modules may count their calls or keep running statistics.
    """
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    # Storages: of a table whose rows overlap in memory a copy of the tensor would be larger than the table.
    buffers = [
        (module, name, buffer, _storage(buffer).clone(), version_of(buffer))
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        with same_generators():
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training
        for module, name, buffer, copy, version in buffers:
            setattr(module, name, buffer)
            if version_of(buffer) != version:
                _storage(buffer).copy_(copy)


def _storage(buffer: Tensor) -> UntypedStorage:
    """Where this rank's numbers are: under tensor parallelism buffers may be DTensors, which hold none themselves."""
    local = buffer.to_local() if isinstance(buffer, DTensor) else buffer
    return local.untyped_storage()
