"""The private API of torch that this package uses, checked for torch 2.11 to 2.15.

* ``LocalElasticAgent._start_workers``, ``_monitor_workers`` and ``_rendezvous``, which ``SimpleElasticAgent.run`` calls:
  torch has no public hook for the start or the polling of an agent's workers, or for the wait for other machines;
* ``DynamicRendezvousHandler._state_holder``: its state has the machines that have joined.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.api import RendezvousHandler


class ExtensibleAgent(LocalElasticAgent):
    """An elastic agent whose subclasses may extend how it starts its workers and how it polls them."""

    def start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the workers of this machine; return the process id of each by local rank."""
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Return the state of the workers, and the results of those that have ended."""
        return super()._monitor_workers(worker_group)

    def rendezvous(self, worker_group: WorkerGroup) -> None:
        """Wait for the other machines, and give the workers their ranks."""
        super()._rendezvous(worker_group)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return self.start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return self.monitor_workers(worker_group)


def machines_joined(handler: RendezvousHandler) -> int | None:
    """Return the number of machines that have joined; ``None`` if the kind of rendezvous does not know it."""
    holder = getattr(handler, "_state_holder", None)
    return None if holder is None else len(holder.state.participants)
