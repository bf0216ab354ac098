"""The microbatch that is being computed, for modules that need to know which global elements they compute on
(:mod:`titan_core.api.random_streams`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from titan_core.api.batch import Batch


@dataclass
class AuxiliaryLosses:
    """Those of a step, on this rank (:mod:`titan_core.api.auxiliary_loss`)."""

    scale: float
    """One over the positions of the global batch."""
    values: dict[str, Tensor] = field(default_factory=dict)
    """By name, what was added so far; scalars, scaled."""
    divided: set[str] = field(default_factory=set)
    """Names whose values each rank that divides weights has for positions of its own."""

    def add(self, name: str, value: Tensor, divided: bool) -> None:
        """Add ``value``, which is not scaled yet."""
        value = value.detach() * self.scale
        self.values[name] = self.values[name] + value if name in self.values else value
        if divided:
            self.divided.add(name)


@dataclass(frozen=True)
class Microbatch:
    """A microbatch of a training step."""

    batch: Batch
    """As this rank's model receives it, divided already."""
    step: int
    """The optimizer step, counted from 1."""
    seed: int
    """``training.seed``."""
    auxiliary: AuxiliaryLosses | None = None
    """Where the auxiliary losses of the step go; ``None`` where nothing is trained."""
    key: Tensor = field(init=False, repr=False)
    """A hash of seed and step: an int64 scalar on the batch's device. As a number, it would be a constant of compiled code,
    which each step would compile again."""

    derived: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    """What modules that draw have computed of its tokens, by first column and columns."""

    def __post_init__(self) -> None:
        digest = hashlib.sha256(f"{self.seed}:{self.step}".encode()).digest()
        value = int.from_bytes(digest[:8], "little", signed=True)
        # Filled on the device, since a copy from the host would wait for it.
        key = torch.full((), value, dtype=torch.int64, device=self.batch.tokens.device)
        object.__setattr__(self, "key", key)


# Not a context variable: autograd runs the backward pass of a CUDA device in a thread of its own, which would see none.
_current: Microbatch | None = None


def current_microbatch() -> Microbatch | None:
    """The microbatch whose forward pass, or whose recomputation, is running."""
    return _current


@contextmanager
def entered(microbatch: Microbatch | None) -> Iterator[None]:
    """Make ``microbatch`` the current one. Recomputation enters what was current in the forward pass."""
    global _current
    before, _current = _current, microbatch
    try:
        yield
    finally:
        _current = before
