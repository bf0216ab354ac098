"""Objectives for tests."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from titan_core.api import Batch, Microbatch, ObjectiveFunction, Vocabulary


class OfTargets(ObjectiveFunction):
    """An objective that calls a function of logits and targets, over the whole vocabulary."""

    vocabulary_sharded = False

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._function = function

    def __call__(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
        assert vocabulary.group is None
        return self._function(logits, batch.targets)


def first_step(batch: Batch) -> Microbatch:
    """Return ``batch`` as a microbatch of the first step."""
    return Microbatch(batch, step=1, seed=0)
