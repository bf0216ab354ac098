"""Forward passes without side effects, for observers and validation: training state stays unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor

from titan_core.api import Batch, ModelPart, ObjectiveFunction, StepInput, StepRunner
from titan_core.api.parallel.microbatch import AuxiliaryLosses
from titan_core.toolkit.random_state import same_generators
from titan_core.torch_private import version_of


@contextmanager
def preserved_state(parts: Sequence[ModelPart]) -> Iterator[None]:
    """Apply :func:`preserved_module` to every part, and reshard the parameters that forward passes gathered."""
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
def evaluation(parts: Sequence[ModelPart]) -> Iterator[None]:
    """:func:`preserved_state`, in evaluation mode, without gradients and without the compiler: compiled code would be
    compiled again for other shapes, and training would then run that code."""
    with preserved_state(parts), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for part in parts:
            part.module.eval()
        yield


@contextmanager
def other_objective(parts: Sequence[ModelPart], objective: ObjectiveFunction) -> Iterator[None]:
    """Let ``objective`` receive what the model computes."""
    before = [part.objective for part in parts]
    for part in parts:
        part.objective = objective
    try:
        yield
    finally:
        for part, own in zip(parts, before, strict=True):
            part.objective = own


def repeat_forward(run: StepRunner, inputs: StepInput, parts: Sequence[ModelPart]) -> Tensor:
    """See :attr:`titan_core.api.PendingUpdate.repeat_forward`."""
    with preserved_state(parts):
        return run.evaluate(replace(inputs, auxiliary=None, metrics=None, statistics=None))


@contextmanager
def repeat_backward(
    run: StepRunner, inputs: StepInput, parts: Sequence[ModelPart], microbatches: Sequence[Batch] | None = None
) -> Iterator[None]:
    """See :attr:`titan_core.api.PendingUpdate.repeat_backward`."""
    assert inputs.auxiliary is not None
    batches = inputs.batches if microbatches is None else microbatches
    auxiliary = AuxiliaryLosses(inputs.auxiliary.scale)
    uncounted = replace(inputs, batches=batches, auxiliary=auxiliary, metrics=None, statistics=None)
    with preserved_state(parts):
        for part in parts:
            part.module.zero_grad()
        run(uncounted)
        yield


@contextmanager
def preserved_module(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers, training modes and random generators on exit, bit for bit.

    Gradients are kept by reference, so the body must not change them in place. Pipeline schedules drop gradients when they
    switch between training and evaluation (torch 2.11 to 2.15); modules may count calls or keep running statistics.
    """
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    # Storages, because rows of a table may overlap in memory: a copy of the tensor would be larger than the table.
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
    """Return the storage of this rank's values. Under tensor parallelism buffers may be DTensors, which own no storage."""
    local = buffer.to_local() if isinstance(buffer, DTensor) else buffer
    return local.untyped_storage()
