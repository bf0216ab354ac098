"""Measures the links between ranks, by the collectives that training uses."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from titan_simulate.calibrate.result import CollectivePoint
from titan_simulate.calibrate.timing import Timing

SMALL = 2**10
LARGE = {"cpu": 2**23, "cuda": 2**28}
"""Bytes of the smallest and the largest messages."""
ROUNDS = 9
SECONDS = {"cpu": 0.05, "cuda": 0.05}
"""Duration of a round."""


def measure_links(group: dist.ProcessGroup, device: torch.device, rounds: int = ROUNDS) -> list[CollectivePoint]:
    """Return the collectives of ``group``, in which every rank calls this. The figures are those of its slowest rank.

    Raises:
        UserError: the clock shows no plausible time.
    """
    points = []
    for size in (SMALL, LARGE[device.type]):
        for kind, call in _collectives(group, device, size):
            timing = _time(call, kind, group, device, rounds)
            points.append(CollectivePoint(kind, group.size(), size, timing.seconds, timing.spread))
    return points


def _collectives(group: dist.ProcessGroup, device: torch.device, size: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each collective on ``size`` bytes."""
    ranks, rank = group.size(), group.rank()
    share = math.ceil(size / 4 / ranks)
    whole, part = torch.zeros(share * ranks, device=device), torch.zeros(share, device=device)
    yield "all_gather", lambda: dist.all_gather_into_tensor(whole, part, group=group)
    yield "reduce_scatter", lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    yield "all_reduce", lambda: dist.all_reduce(whole, group=group)
    following, preceding = (
        dist.get_global_rank(group, (rank + 1) % ranks), dist.get_global_rank(group, (rank - 1) % ranks)
    )  # fmt: skip
    received = torch.empty_like(whole)

    def send() -> None:
        """Pass a message around the ring: every rank sends and receives."""
        operations = [
            dist.P2POp(dist.isend, whole, following, group), dist.P2POp(dist.irecv, received, preceding, group)
        ]  # fmt: skip
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    yield "send", send


def _time(call: Callable[[], object], kind: str, group: dist.ProcessGroup, device: torch.device, rounds: int) -> Timing:
    for _ in range(3):
        call()  # connects the ranks
    once = _spent(call, 3, group, device)
    calls = max(1, min(500, math.ceil(SECONDS[device.type] / max(once, 1e-6))))
    return Timing.of((_spent(call, calls, group, device) for _ in range(rounds)), kind.replace("_", "-"))


def _spent(call: Callable[[], object], calls: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the mean seconds of ``calls`` calls on the slowest rank, the same number on every rank."""
    seconds = torch.zeros(1, device=device)
    dist.all_reduce(seconds, group=group)  # all start together
    _finish(device)
    began = time.perf_counter()
    for _ in range(calls):
        call()
    _finish(device)
    seconds.fill_((time.perf_counter() - began) / calls)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    return float(seconds.item())


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
