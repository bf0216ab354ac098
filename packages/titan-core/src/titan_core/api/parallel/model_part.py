"""The part of a model that one rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from titan_core.api.model.layout import ModelLayout
from titan_core.api.model.layout_rules import CAUSAL_ATTENTION, Mixer
from titan_core.api.parallel.microbatch import Microbatch, microbatch_scope
from titan_core.api.plugins.component import Slot
from titan_core.api.plugins.errors import UserError, shown
from titan_core.api.training.batch import Batch, ObjectiveFunction
from titan_core.api.training.vocabulary import Vocabulary

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

T = TypeVar("T")


class PrunedModule(nn.Module):
    """Replaces a module that another rank holds, so that other modules keep their names. Returns its first argument."""

    def forward(self, hidden: Tensor, *arguments: object, **keywords: object) -> Tensor:
        """Return ``hidden`` unchanged."""
        return hidden


@dataclass
class ModelPart:
    """The whole model, or the modules of it that a pipeline split leaves on this rank. Transforms modify or replace it."""

    module: nn.Module
    """The ``nn.Module``. A transform may change or wrap its modules, and leaves the names of parameters as they are."""
    layout: ModelLayout
    """Describes the modules that this part has, with their names in the whole model."""
    objective: ObjectiveFunction
    """The loss to minimise."""
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    """The logit columns that this rank computes."""

    batch_transforms: tuple[Callable[[Batch], Batch], ...] = ()
    """Functions applied to each microbatch, in order, before the model receives it."""
    parameters_on: torch.device | None = None
    """Device of parameters that are not in use; ``None``: the device that computes."""
    slots: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Values that plugins leave for each other, by slot and module: see :meth:`fill` and :meth:`entries`."""
    saved_operators: tuple[Callable[..., object], ...] = ()
    """Operators (``torch.ops.aten.max.default``) whose results selective activation checkpointing saves because they are
    expensive to recompute for their size, or were communicated. A model lists the operators that it calls in its layout."""
    after_evaluation: tuple[Callable[[], None], ...] = ()
    """Functions to call after forward passes that no backward pass follows."""
    weights_changed: tuple[Callable[[], None], ...] = ()
    """Functions to call after the values of parameters were replaced between steps, as to validate an average of weights:
    what was computed from them beforehand is outdated."""
    wrapped_objectives: tuple[ObjectiveFunction, ...] = ()
    """The objectives that :attr:`objective` wraps, innermost first."""
    auxiliary_losses: tuple[str, ...] = ()
    """Names of the losses that modules add (:mod:`titan_core.api.model.auxiliary_loss`)."""
    statistics: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Name -> shape of what modules count in each step (:func:`~titan_core.api.add_statistic`): the model's own
    (:attr:`ModelLayout.statistics <titan_core.api.ModelLayout.statistics>`), and those that transforms add."""
    attention_masks: Callable[[Batch, Iterable[Mixer]], Mapping[str, Tensor | BlockMask]] | None = None
    """Makes the masks of a microbatch, by name, for causal attention that a transform has divided; receives the microbatch's
    batch and the attention's layout. ``None``: attention is that of the batch's positions to whole sequences."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Parameters of this part that are copies of another part's, by name -> name of the original. The transform that made
    them keeps them equal to it whenever the part computes, and adds their gradients to the original's. Only the original is
    trained, saved, observed and counted."""
    loss_in_head: bool = False
    """Whether the last module returns the loss within :meth:`computing`. The core sets it after all transforms."""
    batch: Batch | None = None
    """Within :meth:`computing`, the current microbatch."""

    def wrap_objective(self, wrapper: Callable[[ObjectiveFunction], ObjectiveFunction]) -> None:
        """Minimise ``wrapper(objective)``. Transforms must not assign :attr:`objective`: that would drop the objective that
        the job selects, and is refused."""
        self.wrapped_objectives += (self.objective,)
        self.objective = wrapper(self.objective)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that the objective, or one that it wraps, reports."""
        objectives = (*self.wrapped_objectives, self.objective)
        return tuple(sorted({name for objective in objectives for name in objective.metrics}))

    def fill(self, slot: str, module: str, value: object) -> None:
        """Leave ``value`` in the slot of another plugin, for ``module``.

        Args:
            slot: the name of the slot. If the package before its dot is installed and declares no such slot, the job is
                refused; if it is not installed, the value has no reader.
            module: the fully qualified name of the module that the value describes. Only the transform that has filled an
                entry may replace it.
        """
        self.slots.setdefault(slot, {})[module] = value

    def entries(self, slot: Slot[T]) -> Mapping[str, T]:
        """Return the values in ``slot`` by the fully qualified name of the module that each describes. A pipeline stage has
        the entries of its modules."""
        return MappingProxyType(self.slots.get(slot.name, {}))

    def transformed(self, batch: Batch) -> Batch:
        """Return ``batch`` after :attr:`batch_transforms`, as this part's model takes it."""
        for transform in self.batch_transforms:
            batch = _batch(transform(batch), transform)
        return batch

    @contextmanager
    def computing(self, microbatch: Microbatch) -> Iterator[Batch]:
        """Mark the forward passes inside the context as computing ``microbatch``. The loss can then be computed inside the
        model's head, and modules can query the microbatch (:func:`~titan_core.api.current_microbatch`).

        Args:
            microbatch: its batch must already be :meth:`transformed`.
        """
        attention = [mixer for mixer in self.layout.mixers.values() if mixer.kind == CAUSAL_ATTENTION]
        if attention:
            microbatch.make_document_mask(attention, self.attention_masks)
        self.batch = microbatch.batch
        try:
            with microbatch_scope(microbatch):
                yield microbatch.batch
        finally:
            self.batch = None

    def forward_loss(self, microbatch: Microbatch) -> Tensor:
        """Return the loss of one microbatch, summed over its weighted targets. The part must be the whole model."""
        with self.computing(replace(microbatch, batch=self.transformed(microbatch.batch))) as batch:
            return self.loss_of(self.module(batch.tokens, **arguments_of(batch, self.layout)), batch)

    def loss_of(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the loss, given what the last module returned within :meth:`computing`."""
        return output if self.loss_in_head else self.loss_from(output, batch)

    def loss_from(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return what :attr:`objective` computes.

        Raises:
            UserError: that is no loss.
        """
        return require_scalar(self.objective(logits, batch, self.vocabulary), self.objective)

    def retie(self) -> None:
        """Restore the sharing of tied parameters after an operation has given each name a tensor of its own."""
        for name, source in self.layout.tied.items():
            owner, _, leaf = name.rpartition(".")
            from_module, _, parameter = source.rpartition(".")
            # Not getattr(): within a module's forward, its attributes may be this rank's shares of its parameters.
            sources = dict(self.module.get_submodule(from_module).named_parameters(recurse=False, remove_duplicate=False))
            setattr(self.module.get_submodule(owner), leaf, sources[parameter])

    def blocks(self) -> dict[str, nn.Module]:
        """Return the repeated blocks that this part has, by fully qualified name, in order."""
        container = self.module.get_submodule(self.layout.blocks)
        return self.present(f"{self.layout.blocks}.{name}" for name, _ in container.named_children())

    def present(self, names: Iterable[str]) -> dict[str, nn.Module]:
        """Return the modules in ``names`` that this part has, in order."""
        found = {name: self.module.get_submodule(name) for name in names}
        return {name: module for name, module in found.items() if not isinstance(module, PrunedModule)}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return every parameter of this part, without :attr:`copies`, by fully qualified name; a shared one under its first
        name."""
        return ((name, tensor) for name, tensor in self.module.named_parameters() if name not in self.copies)

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Return every module that this part has, by fully qualified name."""
        return ((name, module) for name, module in self.module.named_modules() if not isinstance(module, PrunedModule))


def require_scalar(loss: Tensor, owner: object) -> Tensor:
    """Return ``loss``, which ``owner`` computed: a floating-point tensor without dimensions.

    Raises:
        UserError: it is something else, of which sums and means are others.
    """
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        cls = type(owner)
        why = f"returned {shown(loss)}; it must return a scalar: a tensor of a floating-point type without dimensions"
        raise UserError.one(f"{cls.__module__}.{cls.__qualname__}", why, "fix its plugin")
    return loss


def _batch(made: Batch, transform: Callable[[Batch], Batch]) -> Batch:
    if not isinstance(made, Batch):
        raise UserError.one(f"batch transform {shown(transform)}", f"returned {shown(made)}, no Batch", "fix its plugin")
    return made


def arguments_of(batch: Batch, layout: ModelLayout) -> dict[str, Tensor]:
    """Return the arguments for a call of the model, other than the tokens."""
    arguments = {"positions": batch.positions, "documents": batch.documents}
    arguments |= {name: extra.tensor for name, extra in batch.extras.items() if name in layout.inputs}
    return {name: tensor for name, tensor in arguments.items() if tensor is not None}
