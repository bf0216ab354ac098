"""The private API of torch that this package uses, checked for torch 2.11 to 2.15.

* ``LocalElasticAgent._start_workers``, ``_stop_workers``, ``_monitor_workers`` and ``_rendezvous``, which
  ``SimpleElasticAgent.run`` calls: torch has no public hook for the start, the end or the polling of an agent's workers, or
  for the wait for other machines;
* ``LocalElasticAgent._shutdown``, by which ``run`` ends its workers, ``_shutdown_timeout`` and ``_restart_workers``;
  ``SimpleElasticAgent._remaining_restarts``, which it reads after each failure: torch has no public hook for the decision,
  and counts restarts that another machine has caused;
* ``$TORCHELASTIC_SIGNALS_TO_HANDLE``, which torchrun sets: the signals whose handlers torch replaces when it starts workers;
* ``DynamicRendezvousHandler._state_holder``: its state has the machines that have joined; ``_op_executor`` and
  ``_RendezvousExitOp``: leaving without waiting until the others notice; ``RendezvousTimeout._set_timeouts``. The state is
  changed to open a rendezvous that an earlier job has closed, for which torch has no function.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.api import RendezvousHandler

_REOPEN_SECONDS = 0.5
"""Between two looks at a closed rendezvous."""


class ExtensibleAgent(LocalElasticAgent):
    """An elastic agent whose subclasses may extend how it starts its workers and how it polls them."""

    def start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the workers of this machine; return the process id of each by local rank."""
        with _own_signal_handlers():
            started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Return the state of the workers, and the results of those that have ended."""
        return super()._monitor_workers(worker_group)

    def rendezvous(self, worker_group: WorkerGroup) -> None:
        """Wait for the other machines, and give the workers their ranks."""
        super()._rendezvous(worker_group)

    def allow_restart(self, allowed: bool) -> None:
        """Decide whether torch restarts the workers after the failure that :meth:`monitor_workers` returns next.

        ``TORCHELASTIC_RESTART_COUNT`` is the difference of the two numbers, and continues to count.
        """
        spec = self.get_worker_group().spec
        used = spec.max_restarts - self._remaining_restarts
        self._remaining_restarts = int(allowed)
        spec.max_restarts = used + self._remaining_restarts

    def stop_workers(self, worker_group: WorkerGroup) -> None:
        """End the workers."""
        self.end_workers(signal.SIGTERM, self._shutdown_timeout)

    def end_workers(self, number: signal.Signals, seconds: int) -> None:
        """Send a signal to the workers, and SIGKILL to those that are left after ``seconds``. ``run`` ends with it."""
        super()._shutdown(number, timeout=seconds)

    def restart_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the workers, meet the other machines and start the workers again. Does not count as a restart."""
        super()._restart_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self.end_workers(death_sig, timeout)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.rendezvous(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.stop_workers(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return self.start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return self.monitor_workers(worker_group)


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keep the handlers of this process while torch starts workers. Torch's would override ``nohup``, pass each signal on to
    ranks that save on SIGTERM only, and raise an ``Exception``, which callers of plugins catch.

    Torch needs at least one signal to handle; nobody sends SIGURG.
    """
    name = "TORCHELASTIC_SIGNALS_TO_HANDLE"
    before, handler = os.environ.get(name), signal.getsignal(signal.SIGURG)
    os.environ[name] = signal.SIGURG.name
    try:
        yield
    finally:
        signal.signal(signal.SIGURG, handler)
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def machines_joined(handler: RendezvousHandler) -> int | None:
    """Return the number of machines that have joined; ``None`` if the kind of rendezvous does not know it."""
    holder = getattr(handler, "_state_holder", None)
    return None if holder is None else len(holder.state.participants)


def members(handler: RendezvousHandler) -> Mapping[Any, int]:
    """Return the machines of the current round, each with its index, as of the last exchange with the store. A machine has
    an attribute ``addr``."""
    joined: Mapping[Any, int] = handler._state_holder.state.participants  # type: ignore[attr-defined]
    return dict(joined)


def has_begun(handler: RendezvousHandler) -> bool:
    """Whether machines have met before."""
    handler.num_nodes_waiting()  # reads the state from the store
    state = handler._state_holder.state  # type: ignore[attr-defined]
    return bool(state.complete or state.round > 0)


def reopen(handler: RendezvousHandler) -> None:
    """Open a rendezvous for a new job if an earlier one has closed it and none of its machines reports any more. Waits until
    the last report is too old to count."""
    holder = handler._state_holder  # type: ignore[attr-defined]
    seen: dict[Any, datetime] | None = None
    while True:
        holder.sync()  # forgets machines whose last report is too old
        state = holder.state
        reports = dict(state.last_heartbeats)
        if not state.closed or (seen is not None and any(reports[node] != seen.get(node) for node in reports)):
            return
        if not reports:
            state.closed = state.complete = False
            state.deadline = None
            state.round += 1  # the store has keys of the last one
            for machines in (state.participants, state.wait_list, state.redundancy_list):
                machines.clear()
            holder.mark_dirty()  # the next exchange keeps the changes, unless another machine was faster
        seen = reports
        time.sleep(_REOPEN_SECONDS)


def set_last_call(handler: RendezvousHandler, seconds: float) -> None:
    """Set how long machines wait for further ones, once the least number has joined."""
    handler.settings.timeout._set_timeouts(last_call=timedelta(seconds=seconds))  # type: ignore[attr-defined]


def stop_heartbeats(handler: RendezvousHandler) -> None:
    """Stop reporting to a store that no longer answers."""
    handler._stop_heartbeats()  # type: ignore[attr-defined]


def leave(handler: RendezvousHandler, seconds: float) -> None:
    """Leave the other machines, which then do not wait for this one.

    Raises:
        RendezvousError: the store does not answer.
    """
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousExitOp

    stop_heartbeats(handler)
    handler._op_executor.run(_RendezvousExitOp(), time.monotonic() + seconds)  # type: ignore[attr-defined]
