"""The current microbatch, for modules that need to know which global elements they compute
(:mod:`titan_core.api.model.random_streams`)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from titan_core.api.model.attention_mask import attention_masks, mask_name, uses_block_masks
from titan_core.api.model.layout_rules import Mixer
from titan_core.api.model.packed_attention import PackedDocuments, packed_documents
from titan_core.api.training.batch import Batch

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    MakeMasks = Callable[[Batch, Iterable[Mixer]], Mapping[str, Tensor | BlockMask]]


@dataclass
class AuxiliaryLosses:
    """The auxiliary losses of a step on this rank (:mod:`titan_core.api.model.auxiliary_loss`)."""

    scale: float
    """One over the number of positions in the global batch."""
    values: dict[str, Tensor] = field(default_factory=dict)
    """Sum of each loss so far, by name; scaled scalars."""
    divided: set[str] = field(default_factory=set)
    """Names of losses that tensor-parallel ranks compute for different positions."""

    def add(self, name: str, value: Tensor, divided: bool) -> None:
        """Add ``value``, which is not yet scaled."""
        value = value.detach() * self.scale
        self.values[name] = self.values[name] + value if name in self.values else value
        if divided:
            self.divided.add(name)


@dataclass
class MetricSums:
    """The metrics of a step or a validation on this rank (:mod:`titan_core.api.training.metric`)."""

    values: dict[str, Tensor] = field(default_factory=dict)
    """By name: the sum of values multiplied by weights, and the sum of weights; fp64 ``[2]``."""

    def add(self, name: str, sums: Tensor) -> None:
        """Add to the sums of a metric."""
        self.values[name] = self.values[name] + sums if name in self.values else sums


class StepCounts:
    """What the modules of this rank count in a step (:mod:`titan_core.api.model.statistic`)."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device, ranks: int, first: bool) -> None:
        """
        Args:
            shapes: of all statistics of the job, by name.
            ranks: number of tensor-parallel ranks that compute the same positions.
            first: whether this rank counts what they all count alike.
        """
        self.ranks, self._first = ranks, first
        sizes = [math.prod(shape) for shape in shapes.values()]
        self.counts = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        """All statistics, flat, so that one collective sums them."""
        self._shapes = shapes
        pieces = zip(shapes.items(), self.counts.split(sizes), strict=True)
        self.values = {name: piece.view(shape) for (name, shape), piece in pieces}
        """Each statistic so far, by name: views of :attr:`counts`."""

    def empty(self) -> StepCounts:
        """Return what counts the same, from 0."""
        return StepCounts(self._shapes, self.counts.device, self.ranks, self._first)

    def add(self, name: str, index: tuple[int, ...], values: Tensor, divided: bool) -> None:
        """Add ``values`` to the part of a statistic at ``index``."""
        if divided or self._first:
            self.values[name][index].add_(values)


@dataclass(frozen=True)
class Microbatch:
    """A microbatch of a training step."""

    batch: Batch
    """The batch as this rank's model receives it, already transformed."""
    step: int
    """The optimizer step, counted from 1."""
    seed: int
    """``training.seed``."""
    auxiliary: AuxiliaryLosses | None = None
    """Collects the auxiliary losses of the step; ``None`` outside training."""
    target_weight: float | Tensor = 1.0
    """:attr:`~titan_core.api.StepInput.target_weight`: what the step divides this microbatch's loss by."""
    metrics: MetricSums | None = None
    """Collects the metrics of the step or of the validation; ``None`` in other forward passes."""
    statistics: StepCounts | None = None
    """Collects the statistics of the step; ``None`` in forward passes that do not count."""
    step_key: Tensor | None = field(default=None, repr=False)
    """:attr:`key` if it is known; ``None``: made from seed and step."""
    key: Tensor = field(init=False, repr=False)
    """Hash of seed and step, an int64 scalar on the batch's device. A Python number would be a constant in compiled code,
    and every step would recompile."""

    derived: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    """Cached token words of random modules, by first column and number of columns."""

    document_mask: Tensor | BlockMask | None = field(init=False, repr=False, compare=False, default=None)
    """The mask that causal attention within documents uses (:mod:`titan_core.api.model.attention_mask`); ``None`` before
    :meth:`make_document_mask`. A compiled block takes it as an input."""
    masks: dict[str, Tensor | BlockMask] = field(init=False, repr=False, compare=False, default_factory=dict)
    """All masks of causal attention, by name (:func:`titan_core.api.model.attention_mask.mask_name`)."""

    packed: PackedDocuments | None = field(init=False, repr=False, compare=False, default=None)
    """The documents on a GPU that variable-length attention computes, made with :attr:`masks`."""

    def __post_init__(self) -> None:
        key = self.step_key
        if key is None:  # filled on the device: a copy from the host would synchronise
            value = key_of_step(self.seed, self.step)
            key = torch.full((), value, dtype=torch.int64, device=self.batch.tokens.device)
        object.__setattr__(self, "key", key)

    def make_document_mask(self, mixers: Iterable[Mixer] = (), make: MakeMasks | None = None) -> None:
        """Make :attr:`masks`, once, and :attr:`document_mask`, if the batch has documents.

        Args:
            mixers: the causal attention of the model.
            make: see :attr:`~titan_core.api.ModelPart.attention_masks`.
        """
        if self.masks or self.packed is not None:
            return
        if uses_block_masks(self.batch.tokens.device):
            object.__setattr__(self, "packed", packed_documents(self.batch))
        self.masks.update(
            attention_masks(self.batch, mixers, self.batch.columns) if make is None else make(self.batch, mixers)
        )
        if self.batch.documents is not None:
            object.__setattr__(self, "document_mask", self.masks.get(mask_name(None)))


def key_of_step(seed: int, step: int) -> int:
    """Return the hash of seed and step from which modules draw random numbers: 64 bits, signed."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{step}".encode()).digest()[:8], "little", signed=True)


# Not a context variable: autograd runs the backward pass of a CUDA device in its own thread, which would not see it.
_current: Microbatch | None = None


def current_microbatch() -> Microbatch | None:
    """Return the microbatch whose forward pass or recomputation is running."""
    return _current


@contextmanager
def microbatch_scope(microbatch: Microbatch | None) -> Iterator[None]:
    """Make ``microbatch`` the current one. Recomputation re-enters the microbatch of its forward pass."""
    global _current
    before, _current = _current, microbatch
    try:
        yield
    finally:
        _current = before
