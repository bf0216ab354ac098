"""The replica groups of a job, as seen from one rank of one of them."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch.distributed import DistNetworkError

from titan_core.api import RunStopped, StepAbandoned, UserError, World
from titan_core.toolkit.listening import bound_socket, is_loopback, listening_address, serve
from titan_ft.check import START_ONE, lighthouse_of, own_host
from titan_ft.config import FaultToleranceSection
from titan_ft.state_transport import StateTransport
from titan_ft.torchft_api import behind, manager, process_group, sum_over_groups

log = logging.getLogger(__name__)

MOST_FAILURES = 20
"""Number of successive attempts at a step that ends the run. For a group that has not taken a step since it started, half of
it: then the group at fault ends before those that it would take along."""
MOST_COPIES = 3
"""Number of successive failures to copy the state of a peer that ends the run. The other groups do not count them."""
_PAUSE_SECONDS = 1.0
"""Time between two attempts while too few groups run."""


class ReplicaGroups:
    """Forms quorums of the groups that run, sums tensors over them, and decides with them whether a step counts.

    For each attempt at a step, call :meth:`join`, :meth:`sum` as often as needed, and :meth:`commit`, on all ranks.
    """

    def __init__(
        self,
        section: FaultToleranceSection,
        world: World,
        step: int,
        quorum_seconds: float,
        collect: Callable[[], dict[str, Any]],
    ) -> None:
        """
        Args:
            step: number of steps that this group has taken.
            quorum_seconds: longest wait for the other groups at the start of a step.
            collect: returns this rank's state after its last step, to be sent to a group that joins.

        Raises:
            UserError: the lighthouse does not answer. Raised on every rank.
        """
        self._world, self._section = world, section
        self._least = section.min_replica_size
        self._received: dict[str, Any] | None = None
        self._failures = self._copies = 0
        self._begun = False
        self._store: Any = None
        timeout = timedelta(milliseconds=section.process_group_timeout_ms)
        lighthouse = lighthouse_of(section)
        host = own_host(lighthouse)
        address = listening_address(host)
        world.on_first_rank(partial(_require_lighthouse, lighthouse, timeout.total_seconds()))
        store = world.on_first_rank(lambda: (host, self._listen(address)))
        self._group = process_group(section.process_group, timeout, is_loopback(host))
        self._manager = manager(
            self._group,
            rank=world.rank,
            world_size=world.size,
            host=host,
            address=address,
            store=store,
            lighthouse=lighthouse,
            replica_id=f"replica_{section.replica_id}",
            min_replica_size=section.min_replica_size,
            timeout=timeout,
            quorum_timeout=timedelta(seconds=quorum_seconds),
            transport=StateTransport(host, address, timeout),
            collect=collect,
            receive=self._receive,
        )
        self._set_step(step)

    @property
    def step(self) -> int:
        """Number of steps that count."""
        return self._manager.current_step()

    @property
    def participants(self) -> int:
        """Number of groups in the quorum."""
        return self._manager.num_participants()

    @property
    def rank(self) -> int:
        """Number of this group among the participants, from 0."""
        rank = self._manager.participating_rank()
        assert (
            rank is not None
        )  # every group of the quorum takes part: those that were behind have copied the state of a peer
        return rank

    def join(self) -> tuple[bool, dict[str, Any] | None]:
        """Form a quorum of the groups that run.

        Returns:
            Whether ranks of this group received the state of a peer, because the group is behind; and what this rank
            received. (Before step 1, all states are equal, and only some ranks receive one.) If so, apply the state and
            start the next step, in the same quorum.

        Raises:
            StepAbandoned: too few groups run, or one failed meanwhile. Raised on every rank of the group.
            RunStopped: no quorum was formed in time, the step has failed too often, or this group failed to copy the state
                of a peer too often.
        """
        before, self._received = self.step, None
        try:
            self._manager.start_quorum()
        except (RuntimeError, TimeoutError, ConnectionError) as error:
            raise RunStopped(
                f"replica group {self._section.replica_id}: no quorum with the other groups: {error}. Check that the "
                f"lighthouse {lighthouse_of(self._section)} is running"
            ) from error
        failed = self._manager.errored() is not None
        # One rank of the group may have received the state, and another one have failed.
        flags = torch.tensor([failed, self._received is not None, behind(self._manager).this], dtype=torch.int64)
        failures, received, copies = self._world.sum(flags).tolist()
        if failures:
            self._set_step(before)
            self._abandon(self._why() or "another rank failed to join the quorum", copies=bool(copies))
        if received:
            return True, self._received
        if self.participants < self._least:
            if not self._failures and self._world.rank == 0:
                log.warning(
                    "waiting: %d replica group(s) run, fault_tolerance.min_replica_size is %d",
                    self.participants, self._least,
                )  # fmt: skip
            self._commit()
            self._failures = 1
            time.sleep(_PAUSE_SECONDS)
            raise StepAbandoned
        return False, None

    def sum(self, tensor: Tensor) -> None:
        """Sum ``tensor`` over the groups in place. After a failure, which :meth:`commit` reveals, its values are
        meaningless."""
        if self.participants > 1:
            sum_over_groups(self._manager, tensor)

    def reject(self, why: str) -> None:
        """Let no rank of this group commit the step."""
        self._manager.report_error(RuntimeError(why))

    def failed(self) -> bool:
        """Whether something failed on this rank since :meth:`join`."""
        return self._manager.errored() is not None

    def commit(self) -> None:
        """Decide whether the step counts; if it does, the optimizer must step.

        Raises:
            StepAbandoned: it does not, because a group failed. Raised on every rank of the group.
            RunStopped: the step has failed too often.
        """
        if not self._commit():
            self._abandon(self._why() or "another rank of this replica group failed", voted=True)
        self._failures = self._copies = 0
        self._begun = True

    def close(self, wait: bool) -> None:
        """Leave the other groups.

        Args:
            wait: whether to wait for threads; not after an error, because they may wait for others.
        """
        self._manager.shutdown(wait=wait)
        self._group.abort(errored=False)

    def _commit(self) -> bool:
        """
        Raises:
            DistNetworkError: another rank of this group did not vote in time.
        """
        try:
            return self._manager.should_commit()
        except TimeoutError as error:
            why = f"replica group {self._section.replica_id}: its ranks did not decide on step {self.step + 1}: {error}"
            raise DistNetworkError(why) from None

    def _abandon(self, why: str, voted: bool = False, copies: bool = False) -> None:
        """
        Args:
            voted: whether this group has voted on the step.
            copies: whether this group is behind, and has not copied the state of a peer.

        Raises:
            StepAbandoned: always, unless this happens too often.
        """
        if not voted:
            self.reject(why)
            self._group.abort()  # the peers that wait for sums of this rank need not wait until the timeout
            self._commit()  # reports the failure, so that the next quorum connects the groups anew
        group = f"replica group {self._section.replica_id}"
        if copies:
            self._copies += 1
            if self._copies == MOST_COPIES:
                raise RunStopped(
                    f"{group}: could not copy the state of a peer {MOST_COPIES} times in a row; the last time: {why}. Check "
                    "that the groups reach each other's ports, or raise fault_tolerance.process_group_timeout_ms (now "
                    f"{self._section.process_group_timeout_ms}), and start the group again: the others continue without it"
                )
        elif not behind(self._manager).others:  # else the failure may be that of a group that joins
            self._failures += 1
            if self._failures == (MOST_FAILURES if self._begun else MOST_FAILURES // 2):
                raise RunStopped(
                    f"{group}: step {self.step + 1} failed {self._failures} times in a row; the last time: {why}. Check "
                    "that the groups reach each other's ports, and start the group again"
                )
        if self._world.rank == 0:
            log.warning("repeating step %d: %s", self.step + 1, why)
        raise StepAbandoned

    def _why(self) -> str:
        error = self._manager.errored()
        return "" if error is None else " ".join(str(error.original_exception).split())[:200]

    def _set_step(self, step: int) -> None:
        self._manager.load_state_dict({"step": step, "batches_committed": 0})

    def _receive(self, state: dict[str, Any]) -> None:
        self._received = state

    def _listen(self, address: str) -> int:
        """Start the group's store, where the ranks of all groups find each other; return its port. It is the group's own,
        because the launcher's, if there is one, may be for a single machine."""
        self._store = serve(bound_socket(address))
        return int(self._store.port)


def _require_lighthouse(address: str, seconds: float) -> None:
    parts = urlsplit(address)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout=seconds).close()
    except OSError as error:
        raise UserError.one(f"lighthouse {address}", f"does not answer: {error.strerror or error}", START_ONE) from None
