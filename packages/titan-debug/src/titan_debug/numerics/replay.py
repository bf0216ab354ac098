"""A step's forward pass once more, with a look at every module's output.

Training itself carries no hooks: what is compiled stays compiled, and nothing is paid for until somebody wants to look. All
ranks must look together, since a forward pass takes all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_core.api.batch import Batch
from titan_core.api.events import PendingUpdate
from titan_core.api.layout import ModelLayout
from titan_core.api.model_part import ModelPart
from titan_core.api.objective import ObjectiveFunction
from titan_core.api.step import is_shape_inference
from titan_core.api.vocabulary import Vocabulary

Look = Callable[[str, nn.Module, list[Tensor]], None]
"""(fully qualified name, module, the floating-point tensors of its output, as this rank has them)."""


def replay(update: PendingUpdate, parts: Sequence[ModelPart], look: Look) -> Tensor:
    """Repeat the forward pass of ``update``'s step on this rank's ``parts``, by the weights as they still are and without
    the compiler. ``look`` sees each module when it has been called: inner ones before those around them, with pipelines and
    accumulation once a microbatch. Nothing of the run changes by it.

    Returns:
        This rank's share of the loss, summed over targets.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for part in parts:
            head = part.layout.head[-1] if part.loss_in_head else ""
            if head:  # it returns the loss; its logits, a chunk at a time, are what the objective is given
                module = part.module.get_submodule(head)
                stack.callback(setattr, part, "objective", part.objective)
                part.objective = _Observed(part.objective, partial(look, head, module))
            for name, module in part.named_modules():
                if name in ("", head):
                    continue  # the output of the whole is that of its last module, which in a pipeline may be any
                hook = module.register_forward_hook(partial(_looked_at, look, name))
                stack.callback(hook.remove)
        return update.repeat_forward()


class _Observed(ObjectiveFunction):
    """An objective whose logits are looked at."""

    def __init__(self, objective: ObjectiveFunction, look: Callable[[list[Tensor]], None]) -> None:
        self.vocabulary_sharded, self.per_position = objective.vocabulary_sharded, objective.per_position
        self._objective, self._look = objective, look

    def __call__(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
        """See :class:`~titan_core.api.objective.ObjectiveFunction`."""
        self._look([logits.detach()])
        return self._objective(logits, batch, vocabulary)


def _looked_at(look: Look, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
    if not is_shape_inference():
        look(name, module, list(local_tensors(output)))


def local_tensors(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in ``value`` (a tensor, or tuples, lists and dicts of them), as this rank holds them. Sums
    that are still to be made over ranks are left out: what a rank holds of them means nothing yet."""
    if isinstance(value, DTensor):
        if not any(placement.is_partial() for placement in value.placements):
            yield from local_tensors(value.to_local())
    elif isinstance(value, Tensor):
        if value.is_floating_point():
            yield value.detach()
    elif isinstance(value, dict):
        for one in value.values():
            yield from local_tensors(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from local_tensors(one)


def place_in_model(name: str, layout: ModelLayout) -> tuple[int, int]:
    """Where the module or parameter ``name`` stands in the whole model, whatever part of it a rank has: embedding, blocks,
    head, in the order in which hidden states pass through them; what is none of these comes last."""

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
    """What this rank holds of each parameter's gradient, in the model's order."""
    for part in parts:
        for name, parameter in part.module.named_parameters():
            if parameter.grad is not None:
                yield from ((name, tensor) for tensor in local_tensors(parameter.grad))
