"""Elastic jobs (``--nnodes MIN:MAX``): an agent whose machines may leave and return.

The machines of each round agree on a :class:`~titan_launch.sizes.Plan` through the store of their rendezvous. Machines that
leave or join, and failures that another machine caused, do not count against ``--max-restarts``.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Literal

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
)

from titan_core.api.errors import EXIT_LOST_PEER, EXIT_PREEMPTED, UserError
from titan_core.api.launcher import Outcome
from titan_core.api.tools.phases import phase
from titan_launch import restart_policy
from titan_launch.agent import ROLE, JobEnded, RankAgent
from titan_launch.failure import Failure
from titan_launch.sizes import Plan, Sizes, choose, overrides
from titan_launch.torch_private import has_begun, leave, members, set_last_call, stop_heartbeats

LAST_CALL_SECONDS = 5.0
"""How long machines that meet again wait for further ones, once the least number has joined. At the first start, when
machines may come later, they wait for torch's 30 s."""
_POLL_SECONDS = 0.1
_MACHINE, _PLAN, _FAILURE, _END = "titan/machine/", "titan/plan", "titan/failure", "titan/end"


class StoreLost(Exception):
    """The store of the rendezvous no longer answers."""


class ElasticAgent(RankAgent):
    """Restarts the job on the machines that are left, and on more of them when they return."""

    def __init__(
        self, *arguments: Any, sizes: Sizes, when_impossible: Literal["wait", "stop"], timeout: int, fixed_last_call: bool
    ) -> None:
        """
        Args:
            arguments: those of :class:`~titan_launch.agent.RankAgent`.
            sizes: the numbers of ranks that the job can train on.
            when_impossible: what to do while the job cannot train on the machines that have joined.
            timeout: how long to wait for more machines, in seconds.
            fixed_last_call: whether the user has set how long machines wait for further ones.
        """
        super().__init__(*arguments)
        self._sizes, self._when_impossible, self._timeout = sizes, when_impossible, timeout
        self._fixed_last_call = fixed_last_call
        spec = self._worker_group.spec
        self._handler, self._per_node, self._rank_arguments = spec.rdzv_handler, spec.local_world_size, spec.args
        self._plan: Plan | None = None
        self._before: Plan | None = None
        self._machines_before: frozenset[Any] = frozenset()
        self._trainers: frozenset[Any] = frozenset()
        self._lost_at: float | None = None
        self._caused_elsewhere = ""
        self._follows = self._failed_itself = False
        self.trains = False  # the job continues without a machine that waits or idles

    def run(self, role: str = ROLE) -> RunResult:
        """Run the job until its end. May be called again after :class:`StoreLost`.

        Raises:
            StoreLost: the store of the rendezvous no longer answers. The ranks have ended.
        """
        try:
            return super().run(role)
        except (RendezvousConnectionError, DistNetworkError) as error:
            if self._plan is None:
                raise
            stop_heartbeats(self._handler)
            raise StoreLost from error

    def reconnect(self, handler: RendezvousHandler) -> None:
        """Use another rendezvous, for the next :meth:`run`."""
        self._handler = self._worker_group.spec.rdzv_handler = handler
        self._worker_group.store, self._machines_before, self.failure = None, frozenset(), None
        self._follows, self._failed_itself, self._caused_elsewhere = False, False, "the rendezvous has returned"

    def rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the other machines until those that have joined can train, and agree on a plan.

        Raises:
            UserError: no number of them can train, and the user has chosen to stop, or no other machine came in time.
            JobEnded: the job has ended on the other machines.
        """
        self.trains, store = False, worker_group.store
        while True:
            try:
                if not self._fixed_last_call and has_begun(self._handler):
                    set_last_call(self._handler, LAST_CALL_SECONDS)
                super().rendezvous(worker_group)
                plan = self._agree(worker_group)
                if plan is not None and not plan.machines:
                    self._wait(worker_group, plan)
                    continue
            except RendezvousClosedError:
                if self._plan is None:
                    raise
                self._read_end(store)
                raise JobEnded from None
            except DistStoreError:  # a machine left while it was waited for
                continue
            if plan is not None:
                break
        self._read_failure(store)
        self._adopt(worker_group, plan)

    def start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start this machine's ranks, unless it idles; report what has changed.

        Raises:
            UserError: fewer or more machines than requested have joined.
            JobEnded: the ranks lost each other although all machines are there, and may not be restarted again.
        """
        assert self._plan is not None
        now = frozenset(members(self._handler))
        why = _changes(self._machines_before, now) or self._caused_elsewhere
        if self._follows and not why:
            if not self.decide(EXIT_LOST_PEER).restarts:
                raise JobEnded
            self._attempt += 1
        if self._before is not None and (not self._failed_itself or now != self._machines_before):
            why = why or "the ranks lost each other"
            self._console.say(f"{why}; restarting: {self._before.ranks} -> {self._plan}")
        self._machines_before, self._before = now, self._plan
        self._follows, self._failed_itself, self._caused_elsewhere, self._lost_at = False, False, "", None
        if not self.trains:
            self.failure = None
            trains = self._plan.machines
            self._console.say(f"this machine idles: {trains} of {len(now)} machines train, because {self._plan.why}")
            return {}
        if self._plan.why and worker_group.group_rank == 0:
            self._console.say(f"{len(now) - self._plan.machines} of {len(now)} machines idle, because {self._plan.why}")
        more = [argument for one in overrides(self._plan.batch) for argument in (f"--{one.key}", one.text)]
        worker_group.spec.args = (*self._rank_arguments, *more)
        return super().start_workers(worker_group)

    def stop_workers(self, worker_group: WorkerGroup) -> None:
        """End the ranks: with time to save a checkpoint, unless they wait for ranks that are lost."""
        if self._lost_at is None:
            super().stop_workers(worker_group)
        else:
            waited = time.monotonic() >= self._lost_at + restart_policy.GRACE_SECONDS
            self.stop_ranks(signal.SIGKILL if waited else signal.SIGTERM, int(restart_policy.GRACE_SECONDS))

    def report_change(self) -> None:
        """Nothing: :meth:`start_workers` reports what has changed."""

    def monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Return the state of the ranks. Restarts them once a machine that trains has left.

        Raises:
            JobInterrupted: the user interrupted the ranks.
            JobEnded: this machine idles, and the job has ended.
        """
        if not self.trains:
            if self._handler.is_closed():
                self._read_end(worker_group.store)
                raise JobEnded
            if self._lost():
                self.restart_workers(worker_group)
            return RunResult(state=WorkerState.HEALTHY)
        result = super().monitor_workers(worker_group)
        if result.state == WorkerState.HEALTHY and self._pids and self._lost():
            now = time.monotonic()
            self._lost_at = self._lost_at or now
            if (
                now >= self._lost_at + restart_policy.GRACE_SECONDS
            ):  # the ranks wait for those that are lost, as they do with NCCL
                self.restart_workers(worker_group)
        return result

    def only_follows(self, exited: Mapping[int, int], local_ranks: set[int], outcomes: Mapping[int, Outcome]) -> bool:
        """See :meth:`titan_launch.agent.RankAgent.only_follows`. Ranks that stop in order follow a SIGTERM that another
        machine received; a rank that hangs may wait for another machine only if one has left."""
        orderly = set(exited.values()) <= {0, EXIT_PREEMPTED}
        peers = all(
            status in (0, EXIT_PREEMPTED, -signal.SIGABRT) or (rank in outcomes and outcomes[rank].follows)
            for rank, status in exited.items()
        )
        self._follows = orderly or (peers and (local_ranks == exited.keys() or self._lost()))
        return self._follows

    def leave(self) -> None:
        """Leave the other machines, which then restart at once instead of waiting for this one."""
        with suppress(RendezvousError):  # the others then miss its reports
            leave(self._handler, LAST_CALL_SECONDS)

    def publish_failure(self, failure: Failure) -> None:
        """Report a failure of this machine's ranks to the other machines, whose ranks fail because of it."""
        self._failed_itself, store = True, self._worker_group.store
        if store is not None:
            store.set(_FAILURE, json.dumps({"status": failure.status, "line": failure.lines[-1]}))

    def publish_end(self, status: int, line: str) -> None:
        """See :meth:`titan_launch.agent.RankAgent.publish_end`."""
        store = self._worker_group.store
        if store is not None:
            store.set(_END, json.dumps({"status": status, "line": line}))

    def _agree(self, worker_group: WorkerGroup) -> Plan | None:
        """Return the plan of the first machine; ``None`` if a machine has left meanwhile."""
        store, rank, size = worker_group.store, worker_group.group_rank, worker_group.group_world_size
        assert store is not None and rank is not None and size is not None
        batch = self._plan.batch if self._plan is not None else 0
        store.set(f"{_MACHINE}{rank}", json.dumps({"ranks": self._per_node, "batch": batch}))
        if rank == 0:
            keys = [f"{_MACHINE}{number}" for number in range(size)]
            if not self._await(store, keys):
                return None
            machines = [json.loads(store.get(key)) for key in keys]
            kept = max(machine["batch"] for machine in machines)
            plan = choose(self._sizes, [machine["ranks"] for machine in machines], self._machines[0], kept)
            store.set(_PLAN, json.dumps(asdict(plan)))
        if not self._await(store, [_PLAN]):
            return None
        return Plan(**json.loads(store.get(_PLAN)))

    def _await(self, store: Any, keys: list[str]) -> bool:
        """Wait for keys; return whether all machines of the round stayed."""
        joined = members(self._handler)
        while not store.check(keys):
            if self._handler.num_nodes_waiting() or members(self._handler) != joined:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _adopt(self, worker_group: WorkerGroup, plan: Plan) -> None:
        """Give the ranks of this machine their place in the plan."""
        assert worker_group.group_rank is not None
        self._plan, self.trains = plan, worker_group.group_rank < plan.machines
        self._trainers = frozenset(node for node, rank in members(self._handler).items() if rank < plan.machines)
        if self.trains:
            worker_group.group_world_size = plan.machines
        for worker in worker_group.workers:
            worker.world_size = worker.role_world_size = plan.ranks

    def _wait(self, worker_group: WorkerGroup, plan: Plan) -> None:
        """Wait until machines join or leave.

        Raises:
            UserError: see :meth:`rendezvous`.
            RendezvousClosedError: the job has ended.
        """
        least, most = self._machines
        where, size = f"--nnodes {least}:{most}", worker_group.group_world_size
        why = f"{size} machine(s) have joined, and {plan.why}"
        if self._when_impossible == "stop":
            raise UserError.one(where, why, "start more machines, or use --elastic wait to wait for them")
        self._console.say(f"waiting for more machines, because {plan.why}")
        joined, until = members(self._handler), time.monotonic() + self._timeout
        with phase(f"waiting for more machines at {self._endpoint}", lambda: f"{size} joined", repeat_seconds=60.0):
            while time.monotonic() < until:
                if self._handler.num_nodes_waiting() or members(self._handler) != joined:
                    return
                if self._handler.is_closed():
                    raise RendezvousClosedError
                time.sleep(_POLL_SECONDS)
        fix = f"start more machines; none joined within {self._timeout} s (--rdzv-timeout)"
        raise UserError.one(where, why, fix)

    def _lost(self) -> bool:
        """Whether a machine that trains has left since the ranks were started."""
        return not self._trainers <= members(self._handler).keys()

    def _read_failure(self, store: Any) -> None:
        """Read what another machine reported about the last round."""
        if store is not None and not self._failed_itself and store.check([_FAILURE]):
            self._blame(json.loads(store.get(_FAILURE)))

    def _read_end(self, store: Any) -> None:
        """Read how the job has ended on the machine that closed it, and end like that. If no machine has said that it is
        complete, it is lost."""
        if store is not None and store.check([_END]):
            found = json.loads(store.get(_END))
            if not found["status"]:
                self.failure = None
            elif not self._failed_itself:
                self._blame(found)
            return
        self._read_failure(store)
        if self.failure is None:
            why = "error: the job has ended on the other machines, and none says why"
            self.failure = Failure(EXIT_LOST_PEER, (why,))

    def _blame(self, found: Mapping[str, Any]) -> None:
        cause = found["line"].removeprefix("error: ").removeprefix("on another machine: ")
        self._caused_elsewhere = f"on another machine: {cause}"
        self.failure = Failure(found["status"], (f"error: {self._caused_elsewhere}",))


def _changes(before: Collection[Any], now: Collection[Any]) -> str:
    """Return which machines have left and joined."""
    left, joined = set(before) - set(now), set(now) - set(before)
    # A machine that was restarted has left and joined.
    texts = [
        f"{', '.join(sorted({node.addr for node in nodes}))} {verb}"
        for nodes, verb in ((left, "left"), (joined, "joined"))
        if nodes
    ]
    return " and ".join(texts) if before else ""
