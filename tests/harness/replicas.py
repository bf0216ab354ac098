"""Replica groups in the processes of the gloo pool, and a lighthouse for them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed import TCPStore

from titan_core.api import ModelDefinition, hookimpl
from titan_core.api.plugins.errors import PartOfContract
from titan_ft import groups as groups_module
from titan_ft.torchft_api import lighthouse_server
from titan_testing import PATIENCE
from titan_testing.jobs import TINY, RunRecord, make_job, run_job

SHARED = {**TINY, "training.local_batch_size": 1, "training.global_batch_size": 4, "training.steps": 8}
"""Settings of a job whose steps two replica groups can share."""


class Leave(PartOfContract):
    """Raised by a test to end a replica group."""


def lighthouse_address(port: int) -> str:
    """The address of a lighthouse on this machine."""
    return f"http://127.0.0.1:{port}"


@contextmanager
def lighthouse(heartbeat_timeout_ms: int = 1000) -> Iterator[str]:
    """A lighthouse in this process; yields its address."""
    server = lighthouse_server("127.0.0.1:0", 1, 60_000, heartbeat_timeout_ms)
    try:
        yield lighthouse_address(int(server.address().rpartition(":")[2]))
    finally:
        server.shutdown()


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@dataclass(eq=False)
class Script:
    """An observer that changes how many groups a step needs, and calls functions, at the start of given steps."""

    least: dict[int, int] = field(default_factory=dict)
    """Step -> least number of groups from then on; 0: from the start."""
    calls: dict[int, Callable[[], None]] = field(default_factory=dict)
    groups: Any = None

    @hookimpl(trylast=True)
    def titan_train_start(self, run: Any) -> None:
        (self.groups,) = _made
        self._need(0)

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        self._need(step)
        self.calls.pop(step, lambda: None)()

    def _need(self, step: int) -> None:
        if step in self.least:
            self.groups._least = self.groups._manager._min_replica_size = self.least[step]


_made: list[groups_module.ReplicaGroups] = []


def run_group(
    address: str,
    number: int,
    observers: tuple[object, ...] = (),
    model: ModelDefinition | None = None,
    **settings: object,
) -> RunRecord:
    """Train replica group ``number`` in this process, of ``model`` or of that of ``tiny``; return its record."""
    made = groups_module.ReplicaGroups.__init__

    def remember(self: Any, *arguments: Any) -> None:
        made(self, *arguments)
        _made[:] = [self]

    groups_module.ReplicaGroups.__init__ = remember  # type: ignore[method-assign]
    groups_module._PAUSE_SECONDS = 0.05
    try:
        own = {
            "fault_tolerance.enable": "true",
            "fault_tolerance.lighthouse": address,
            "fault_tolerance.replica_id": number,
            "job.dump_folder": f"{os.getcwd()}/group-{number}",
        }
        job = make_job("tiny", {**SHARED, **own, **settings})
        return run_job(job if model is None else replace(job, model=model), weights=True, observers=observers)
    finally:
        groups_module.ReplicaGroups.__init__ = made  # type: ignore[method-assign]


def join_group(size: int, ports: list[int]) -> int:
    """Turn the pool's one world into worlds of ``size`` ranks, each with its own store; return the number of this one."""
    rank = int(os.environ.pop("RANK"))
    del os.environ["WORLD_SIZE"]
    group, inner = divmod(rank, size)
    if size > 1:
        os.environ |= {"RANK": str(inner), "WORLD_SIZE": str(size), "MASTER_PORT": str(ports[group])}
    return group


@contextmanager
def stores(number: int) -> Iterator[list[int]]:
    """Stores for the ranks of ``number`` groups; yields their ports."""
    kept = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(number)]
    yield [store.port for store in kept]
