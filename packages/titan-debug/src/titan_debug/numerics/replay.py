"""Repeats a step's forward pass to observe every module's output.

Training itself carries no hooks, so compiled modules stay compiled and observation costs nothing until it is used. All ranks
must replay together because a forward pass involves all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_core.api import Batch, ModelLayout, ModelPart, ObjectiveFunction, PendingUpdate, Vocabulary
from titan_core.api.parallel.step import is_shape_inference
from titan_debug.torch_private import uncompiled

OutputCallback = Callable[[str, nn.Module, list[Tensor]], None]
"""Receives a module's fully qualified name, the module, and this rank's floating-point tensors of its output."""


def replay(update: PendingUpdate, parts: Sequence[ModelPart], on_output: OutputCallback) -> Tensor:
    """Repeat the forward pass of ``update``'s step on this rank's ``parts``, with the weights before the update and without
    compiled modules. The run is not affected.

    Args:
        on_output: called after each module's forward pass, so inner modules come first. With pipelining or gradient
            accumulation it is called once per microbatch.

    Returns:
        This rank's share of the loss, summed over targets.
    """
    with observed_outputs(parts, on_output):
        return update.repeat_forward()


@contextmanager
def observed_outputs(parts: Sequence[ModelPart], on_output: OutputCallback) -> Iterator[None]:
    """Call ``on_output`` after the forward pass of each module, none of which is compiled meanwhile."""
    with ExitStack() as stack:
        for part in parts:
            # Functions that modules call stay compiled: FlexAttention would otherwise materialise all scores.
            stack.enter_context(uncompiled(part.module.modules()))
            head = part.layout.head[-1] if part.loss_in_head else ""
            if head:  # this module returns the loss, so the objective observes its logits, chunk by chunk
                module = part.module.get_submodule(head)
                stack.callback(setattr, part, "objective", part.objective)
                part.objective = _ObservedObjective(part.objective, partial(on_output, head, module))
            for name, module in part.named_modules():
                if name in ("", head):
                    continue  # the root's output is that of its last module, and in a pipeline not the model's output
                hook = module.register_forward_hook(partial(_forward_hook, on_output, name))
                stack.callback(hook.remove)
        yield


class _ObservedObjective(ObjectiveFunction):
    """An objective that passes its logits to a callback."""

    def __init__(self, objective: ObjectiveFunction, on_logits: Callable[[list[Tensor]], None]) -> None:
        self.vocabulary_sharded, self.per_position = objective.vocabulary_sharded, objective.per_position
        self._objective, self._on_logits = objective, on_logits

    def __call__(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
        """See :class:`~titan_core.api.ObjectiveFunction`."""
        self._on_logits([logits.detach()])
        return self._objective(logits, batch, vocabulary)


def _forward_hook(on_output: OutputCallback, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
    if not is_shape_inference():
        on_output(name, module, list(local_tensors(output)))


def local_tensors(value: Any) -> Iterator[Tensor]:
    """Yield this rank's local floating-point tensors in ``value``, which is a tensor or nested tuples, lists and dicts of
    tensors. Omits DTensors with a partial placement: their local values are meaningless before reduction."""
    if isinstance(value, DTensor):
        if not any(placement.is_partial() for placement in value.placements):
            yield from local_tensors(value.to_local())
    elif isinstance(value, Tensor):
        if value.is_floating_point():
            yield value.detach()
    elif isinstance(value, dict):
        for item in value.values():
            yield from local_tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from local_tensors(item)


def place_in_model(name: str, layout: ModelLayout) -> tuple[int, int]:
    """Return a sort key for module or parameter ``name`` in the whole model, independent of the rank's part: embedding,
    blocks and head in the order in which hidden states pass through them, then everything else."""

    def within(container: str) -> bool:
        return name == container or name.startswith(container + ".")

    for stage, modules in ((0, layout.embedding), (2, layout.head)):
        for number, module in enumerate(modules):
            if within(module):
                return stage, number
    if within(layout.blocks) and name != layout.blocks:
        block = name.removeprefix(layout.blocks + ".").partition(".")[0]
        return 1, int(block) if block.isdecimal() else 0
    return 3, 0


def named_gradients(parts: Sequence[ModelPart]) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter's name and this rank's local gradient, in the model's order."""
    for part in parts:
        for name, parameter in part.named_parameters():
            if parameter.grad is not None:
                yield from ((name, tensor) for tensor in local_tensors(parameter.grad))
