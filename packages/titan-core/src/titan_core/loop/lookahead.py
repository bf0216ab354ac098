"""Exchange of the facts that all ranks must know before a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_core.api import UserError, World
from titan_core.api.observe.shared_request import SharedRequests
from titan_core.data.loader import DataLoader, StepData


@dataclass(frozen=True)
class StepTotals:
    """Sums over all ranks, the same on each."""

    num_targets: int
    """Target tokens of the global batch."""
    weight: float
    """Total weight of these targets; equal to their number unless documents have weights."""
    replica_weight: float
    """Weight of the targets that this rank's replica of the weights sees: all targets, unless replicas diverge."""
    by_dataset: list[int]
    """Target tokens of the global batch, by dataset."""
    corrupt: int
    """Corrupt records skipped since the job started."""
    empty: int
    """Empty documents skipped since the job started."""
    data_ended: bool
    """Whether some rank has no data for the step."""
    data_seconds: float
    """Seconds that this rank waited for its data."""


@dataclass(frozen=True)
class _Exchange:
    """A sum that is under way."""

    totals: Callable[[], Tensor]
    replica_weight: Callable[[], Tensor] | None
    requested: list[bool]
    """Whether this rank has sent each request."""
    mistake: UserError | None
    """What is wrong with this rank's data."""
    data_seconds: float


class Lookahead:
    """Exchanges the facts of the next step by one sum over all ranks: of a CPU tensor, because the host needs the result and
    must not wait for the device, and ahead of time, because it must not wait for other ranks either.

    :meth:`begin` reads the data of the next step and starts the sum while the device is computing; :meth:`take` returns the
    result when that step starts. A request that reaches a rank in between is exchanged one step later. All ranks call
    :meth:`begin` at the same place, whether their data is ready or not, because collectives must have the same order.
    """

    def __init__(self, loader: DataLoader, world: World, requests: SharedRequests, datasets: int) -> None:
        """
        Args:
            requests: requests that single ranks may receive. All ranks must have the same ones at each exchange.
        """
        self._loader, self._world, self._requests, self._datasets = loader, world, requests, datasets
        self._begun: _Exchange | None = None

    def begin(self, skipped: Callable[[], bool]) -> None:
        """Start to exchange the facts of the next step. Every rank must call this. A single rank has nothing to exchange,
        and waits for its data when the step starts.

        Args:
            skipped: returns whether this rank skipped the update of the last step whose outcome it knows.
        """
        if self._world.size > 1:
            self._begun = self._exchange(skipped())

    def take(self) -> StepTotals:
        """Return the totals of the next step. Every rank must call this.

        Raises:
            UserError: the data of a rank is invalid. Raised on every rank.
            RuntimeError: only some ranks skipped an update. Raised on every rank.
        """
        world, requests = self._world, self._requests
        exchange = self._begun or self._exchange(skipped=False)
        self._begun = None
        *counted, total_weight = exchange.totals().tolist()
        totals = [int(count) for count in counted]
        flags = 3 + len(exchange.requested)
        ended, mistakes, skips, *anywhere = totals[:flags]
        corrupt, empty, *by_dataset = totals[flags:]
        for request, sent_here, ranks in zip(requests, exchange.requested, anywhere, strict=True):
            request.agree(sent_here, ranks > 0)
        if world.plan.diverging_replicas == 1 and skips not in (0, world.size):
            raise RuntimeError(
                f"{skips} of {world.size} ranks skipped the update of an earlier step, so weights differ between ranks: "
                "titan_before_update of an observer must return the same value on all ranks"
            )
        replica_weight = total_weight if exchange.replica_weight is None else float(exchange.replica_weight())
        if mistakes:
            world.raise_together(exchange.mistake)
        return StepTotals(
            sum(by_dataset), total_weight, replica_weight, by_dataset, corrupt, empty, ended > 0, exchange.data_seconds
        )

    def _exchange(self, skipped: bool) -> _Exchange:
        world = self._world
        data: StepData | None = None
        mistake: UserError | None = None
        started = time.perf_counter()
        try:
            data = self._loader.peek()
        except UserError as error:
            mistake = error
        seconds = time.perf_counter() - started
        # Ranks that see the same tokens are counted once.
        counts = data is not None and world.is_first_along("layers", "sequence", "weights")
        targets = data.targets_by_dataset if data is not None and counts else [0] * self._datasets
        weight = data.target_weight if data is not None and counts else 0.0
        unused = (data.corrupt, data.empty) if data is not None and counts else (0, 0)
        requested = [request.pending for request in self._requests]  # read once, because a signal may arrive at any time
        flags = (data is None, mistake is not None, skipped, *requested)
        # float64 represents counts below 2**53 exactly.
        sent = torch.tensor([*map(int, flags), *unused, *targets, weight], dtype=torch.float64)
        own = torch.tensor(weight, dtype=torch.float64)
        replica = world.sum_later(own, over_replica=True) if world.plan.diverging_replicas > 1 else None
        return _Exchange(world.sum_later(sent), replica, requested, mistake, seconds)
