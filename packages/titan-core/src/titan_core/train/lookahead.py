"""What all ranks must know of a step before they take it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from titan_core.api.errors import UserError
from titan_core.api.shared_request import SharedRequests
from titan_core.api.world import World
from titan_core.data.loader import DataLoader, StepData


@dataclass(frozen=True)
class StepTotals:
    """Sums over all ranks, the same on each."""

    num_targets: int
    """Target tokens of the global batch."""
    weight: float
    """The weight of these targets together; their number, unless documents weigh them."""
    copy_weight: float
    """That of the part of it that this rank's copy of the weights sees: all, unless copies train apart."""
    by_dataset: list[int]
    """Target tokens of the global batch, by dataset."""
    corrupt: int
    """Corrupt records skipped since the job was started."""
    empty: int
    """Empty documents left out since the job was started."""
    data_ended: bool
    """Some rank has no data for the step."""
    data_seconds: float
    """How long this rank waited for its data."""


class Lookahead:
    """Looks at the next step's data, once: one sum over all ranks a step. The host needs the result, so it travels as a
    CPU tensor, without waiting for the device."""

    def __init__(self, loader: DataLoader, world: World, requests: SharedRequests, datasets: int) -> None:
        """
        Args:
            requests: requests that ranks may get; the same ones on all, whenever it looks.
        """
        self._loader, self._world, self._requests, self._datasets = loader, world, requests, datasets

    def look(self, skipped: bool = False) -> StepTotals:
        """To be called by all ranks.

        Args:
            skipped: whether this rank left out the update of the step before.

        Raises:
            UserError: a rank's data is bad; on every rank.
            RuntimeError: some ranks left out that update and others did not; on every rank.
        """
        world, requests = self._world, self._requests
        data: StepData | None = None
        mistake: UserError | None = None
        started = time.perf_counter()
        try:
            data = self._loader.peek()
        except UserError as error:
            mistake = error
        seconds = time.perf_counter() - started
        # Counted once for ranks that see the same tokens.
        counts = data is not None and world.is_first_along("layers", "sequence", "weights")
        targets = data.targets_by_dataset if data is not None and counts else [0] * self._datasets
        weight = data.target_weight if data is not None and counts else 0.0
        left_out = (data.corrupt, data.empty) if data is not None and counts else (0, 0)
        asked = [request.asked for request in requests]  # a signal may come at any moment
        flags = (data is None, mistake is not None, skipped, *asked)
        # float64 has every count below 2**53 exactly.
        sent = torch.tensor([*map(int, flags), *left_out, *targets, weight], dtype=torch.float64)
        *counted, total_weight = world.sum(sent).tolist()
        totals = [int(count) for count in counted]
        ended, mistakes, skips, *anywhere = totals[: len(flags)]
        corrupt, empty, *by_dataset = totals[len(flags) :]
        for request, told, some in zip(requests, asked, anywhere, strict=True):
            request.agree(told, some > 0)
        if world.plan.diverging_replicas == 1 and skips not in (0, world.size):
            raise RuntimeError(
                f"{skips} of {world.size} ranks left out the update of the last step, so that their weights differ from the "
                "others': an observer's titan_before_update must return the same on all ranks"
            )
        copy_weight = total_weight
        if world.plan.diverging_replicas > 1:
            copy_weight = float(world.sum_over_copy(torch.tensor(weight, dtype=torch.float64)))
        if mistakes:
            world.raise_together(mistake)
        return StepTotals(sum(by_dataset), total_weight, copy_weight, by_dataset, corrupt, empty, ended > 0, seconds)
