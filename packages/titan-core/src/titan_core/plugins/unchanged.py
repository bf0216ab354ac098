"""Detection of hooks that change tensors of the run in place.

torch has no read-only views, and copies would cost time and memory in every step. Autograd counts the in-place changes of
each tensor; reading a count costs some 50 ns. Changes through ``tensor.data``, ``numpy()`` or a pointer are not counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_core.api import Batch
from titan_core.torch_private import local_tensor, version_of, versions_of


class Unchanged:
    """The tensors that a hook must leave as they are, while its implementations are called one after another."""

    def __init__(self, argument: Any, parameters: Sequence[Tensor], gradients: bool) -> None:
        """
        Args:
            argument: what the hook receives; its tensors are compared.
            parameters: the run's parameters on this rank, :func:`with_shards`.
            gradients: whether the gradients of the parameters are compared too.
        """
        self._of_argument = [(name, tensor, version_of(tensor)) for name, tensor in _tensors_of(argument)]
        self._parameters = parameters
        self._gradients = [parameter.grad for parameter in parameters] if gradients else []
        self._versions = self._versions_now()

    def first_changed(self, changes_weights: bool) -> str:
        """Return the first tensor that has changed since the last call, in words; empty if none has.

        Args:
            changes_weights: whether the implementation that was just called may change weights and gradients.
        """
        for name, tensor, version in self._of_argument:
            if version_of(tensor) != version:
                return name
        before, gradients, now = self._versions, self._gradients, self._versions_now()
        self._versions = now
        if gradients:  # one may be another tensor now, or dropped, which the trainer reports
            self._gradients = [parameter.grad for parameter in self._parameters]
            self._versions = self._versions_now()
        if changes_weights:
            return ""
        weights = len(self._parameters)
        if before[:weights] != now[:weights]:
            return "a weight"
        replaced = any(new is not old and new is not None for old, new in zip(gradients, self._gradients, strict=True))
        return "a gradient" if before != now or replaced else ""

    def _versions_now(self) -> list[int]:
        """Return the counts of the parameters, and of the gradients that existed before the hook."""
        gradients = [gradient for gradient in self._gradients if gradient is not None]
        return versions_of(itertools.chain(self._parameters, with_shards(gradients)))


def with_shards(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return ``tensors`` and, of each that is sharded, this rank's shard: the whole does not count changes to it."""
    found = list(tensors)
    return found + [local_tensor(tensor) for tensor in found if isinstance(tensor, DTensor)]


def _tensors_of(argument: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a pending update or of a step report."""
    for name in ("loss", "rank_losses", "grad_norm", "skipped"):
        value = getattr(argument, name, None)
        if isinstance(value, Tensor):
            yield name, value
    for name, value in getattr(argument, "auxiliary", {}).items():
        yield f"auxiliary loss {name!r}", value
    for name, value in getattr(argument, "metrics", {}).items():
        if isinstance(value, Tensor):
            yield f"metric {name!r}", value
    for name, value in getattr(argument, "statistics", {}).items():
        yield f"statistic {name!r}", value
    batches: Iterable[Batch] = getattr(argument, "microbatches", ())
    for batch in batches:
        found: list[Tensor] = []
        batch.map(lambda tensor, found=found: found.append(tensor) or tensor)  # type: ignore[misc]
        yield from (("a microbatch", tensor) for tensor in found if not tensor.is_inference())
