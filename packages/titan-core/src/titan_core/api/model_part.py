"""A rank's part of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from titan_core.api.batch import Batch
from titan_core.api.layout import ModelLayout
from titan_core.api.microbatch import Microbatch, entered
from titan_core.api.objective import ObjectiveFunction
from titan_core.api.vocabulary import Vocabulary

T = TypeVar("T")


class PrunedModule(nn.Module):
    """Stands where a module was that other ranks have: gives back its first argument. What is left keeps its names."""

    def forward(self, hidden: Tensor, *arguments: object, **keywords: object) -> Tensor:
        """``hidden``, as it came."""
        return hidden


@dataclass(frozen=True)
class Slot(Generic[T]):
    """A place where one plugin leaves something for another, of type ``T`` for each module. Plugins do not import each
    other, so each declares the slot by the same name: ``PLUGIN.what``, of the plugin that reads it."""

    name: str


@dataclass
class ModelPart:
    """The whole model, or what a pipeline cut left of it on this rank. Transforms change it, or return another."""

    module: nn.Module
    layout: ModelLayout
    objective: ObjectiveFunction
    """What is minimised."""
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    """The columns of the logits that this rank computes."""

    batch_transforms: tuple[Callable[[Batch], Batch], ...] = ()
    """What happens to each microbatch before the model sees it, in order."""
    parameters_on: torch.device | None = None
    """Where parameters live while they are not computed with; ``None``: on the device that computes."""
    slots: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What plugins say to each other about single modules: see :meth:`entries`."""
    saved_operators: tuple[Callable[..., object], ...] = ()
    """Operators (``torch.ops.aten.max.default``) whose results selective recomputation keeps: what is expensive to compute
    again for its size, or was communicated. A model names those that it calls in its layout."""
    after_evaluation: tuple[Callable[[], None], ...] = ()
    """What must be done after forward passes that no backward pass follows."""
    wrapped_objectives: tuple[ObjectiveFunction, ...] = ()
    """The objectives that :attr:`objective` calls in the end, where it was wrapped."""
    auxiliary_losses: tuple[str, ...] = ()
    """Names of the losses that modules add (:mod:`titan_core.api.auxiliary_loss`)."""
    loss_in_head: bool = False
    """Whether the last module returns the loss within :meth:`computing`. The core sets it after all transforms."""
    batch: Batch | None = None
    """Within :meth:`computing`: the microbatch whose loss is computed."""

    def wrap_objective(self, wrapper: Callable[[ObjectiveFunction], ObjectiveFunction]) -> None:
        """Minimise ``wrapper(objective)``. A transform that assigns :attr:`objective` instead drops the one that the job
        selects, which is refused."""
        self.wrapped_objectives += (self.objective,)
        self.objective = wrapper(self.objective)

    def entries(self, slot: Slot[T]) -> dict[str, T]:
        """The entries of ``slot``, by the fully qualified name of the module that each is about. A transform adds to them;
        one that drops or replaces another's entry is refused. A pipeline stage has those of its own modules."""
        return self.slots.setdefault(slot.name, {})

    def transformed(self, batch: Batch) -> Batch:
        """``batch`` as this part's model takes it."""
        for transform in self.batch_transforms:
            batch = transform(batch)
        return batch

    @contextmanager
    def computing(self, microbatch: Microbatch) -> Iterator[Batch]:
        """Forward passes within are training's: the loss of ``microbatch`` is computed where the logits are, and modules
        know what they compute (:func:`~titan_core.api.microbatch.current_microbatch`).

        Args:
            microbatch: divided already (:meth:`transformed`).
        """
        self.batch = microbatch.batch
        try:
            with entered(microbatch):
                yield microbatch.batch
        finally:
            self.batch = None

    def forward_loss(self, microbatch: Microbatch) -> Tensor:
        """Loss of one microbatch, summed over its weighted targets. The whole model is here."""
        with self.computing(replace(microbatch, batch=self.transformed(microbatch.batch))) as batch:
            return self.loss_of(self.module(batch.tokens, **arguments_of(batch, self.layout)), batch)

    def loss_of(self, output: Tensor, batch: Batch) -> Tensor:
        """The loss of what the last module returned within :meth:`computing`."""
        return output if self.loss_in_head else self.objective(output, batch, self.vocabulary)

    def retie(self) -> None:
        """Let names that share a parameter share one again, after something gave each of them a tensor of its own."""
        for name, source in self.layout.tied.items():
            owner, _, leaf = name.rpartition(".")
            from_module, _, parameter = source.rpartition(".")
            # Not by attribute: modules may compute with their own share of a parameter (titan_parallel.local_parameters).
            sources = dict(self.module.get_submodule(from_module).named_parameters(recurse=False, remove_duplicate=False))
            setattr(self.module.get_submodule(owner), leaf, sources[parameter])

    def blocks(self) -> dict[str, nn.Module]:
        """The repeated blocks that this part has, by fully qualified name, in order."""
        container = self.module.get_submodule(self.layout.blocks)
        return self.present(f"{self.layout.blocks}.{name}" for name, _ in container.named_children())

    def present(self, names: Iterable[str]) -> dict[str, nn.Module]:
        """Those of the modules called ``names`` that this part has, in order."""
        found = {name: self.module.get_submodule(name) for name in names}
        return {name: module for name, module in found.items() if not isinstance(module, PrunedModule)}

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module that this part has, by fully qualified name."""
        return ((name, module) for name, module in self.module.named_modules() if not isinstance(module, PrunedModule))


def arguments_of(batch: Batch, layout: ModelLayout) -> dict[str, Tensor]:
    """What a model is called with beside its tokens."""
    arguments = {"positions": batch.positions, "documents": batch.documents}
    arguments |= {name: extra.tensor for name, extra in batch.extras.items() if name in layout.inputs}
    return {name: tensor for name, tensor in arguments.items() if tensor is not None}
