"""Every use of torchft, and of its private names, checked with torchft 0.2.0 on torch 2.11 and 2.15:

* ``torchft.checkpointing._serialization``, which writes and reads tensors and plain values as a stream;
* ``torchft.manager.ManagerServer``, by which the manager starts its server, on all addresses;
* ``Manager._client``, whose answer to ``_quorum`` says which groups are behind. The manager keeps only part of it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from titan_core.api import UserError
from titan_core.toolkit.listening import loopback_networks

os.environ.setdefault("RUST_LOG", "error")  # torchft logs several lines a step otherwise; it reads this when it is imported
try:
    from torchft import manager as _manager
    from torchft.checkpointing import CheckpointTransport as CheckpointTransport
    from torchft.checkpointing._serialization import _streaming_load, _streaming_save
    from torchft.coordination import LighthouseServer
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL
except (ImportError, AttributeError) as error:
    _why = f"cannot be imported with torch {torch.__version__}: {error}"
    raise UserError.one("torchft", _why, "install torchft 0.2, or a version of torch that it works with") from error

if TYPE_CHECKING:
    from torchft.coordination import ManagerClient
    from torchft.process_group import ProcessGroup

_log = logging.getLogger("torchft")
if _log.level == logging.NOTSET:
    _log.setLevel(logging.CRITICAL)  # a peer that dies is an event, which titan-ft reports, not an error with a traceback

_LAZY = "TORCH_GLOO_LAZY_INIT"


def process_group(kind: Literal["gloo", "nccl"], timeout: timedelta, loopback: bool) -> ProcessGroup:
    """Return a process group of replica groups that can change its members.

    Args:
        loopback: whether all of them are on this machine. NCCL learns this from its environment alone.
    """
    return ProcessGroupNCCL(timeout) if kind == "nccl" else _Gloo(timeout, loopback)


class _Gloo(ProcessGroupGloo):  # type: ignore[misc]  # torchft has no type hints to derive from
    """Connects the replica groups when a quorum is formed, not in their first sum: connecting to a group that has left
    meanwhile takes five times the timeout, while a connection that it closes ends a sum at once."""

    def __init__(self, timeout: timedelta, loopback: bool) -> None:
        super().__init__(timeout)
        self._loopback = loopback

    def configure(self, *arguments: Any, **named: Any) -> None:
        variables = {_LAZY: "0", **(loopback_networks() if self._loopback else {})}
        before = {name: os.environ.get(name) for name in variables}
        os.environ |= variables
        try:
            super().configure(*arguments, **named)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


@dataclass(frozen=True)
class Behind:
    """Which groups of the last quorum must copy the state of a peer."""

    this: bool = False
    """This one, for this rank."""
    others: bool = False
    """Another one. The same on all ranks of a group."""


class _Client:
    """The client of a manager's server. Remembers which groups of the last quorum are behind."""

    def __init__(self, client: ManagerClient) -> None:
        self._client = client
        self.behind = Behind()

    def _quorum(self, *arguments: Any, **named: Any) -> Any:
        self.behind = Behind()
        quorum = self._client._quorum(*arguments, **named)  # noqa: SLF001 - see the top of this file
        # Before step 1, groups copy the state of one although none of them is behind: then ``others`` is false.
        behind = quorum.replica_world_size - quorum.max_world_size
        self.behind = Behind(quorum.heal, behind > int(quorum.heal))
        return quorum

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def manager(
    group: ProcessGroup,
    *,
    rank: int,
    world_size: int,
    host: str,
    address: str,
    store: tuple[str, int],
    lighthouse: str,
    replica_id: str,
    min_replica_size: int,
    timeout: timedelta,
    quorum_timeout: timedelta,
    transport: CheckpointTransport[dict[str, Any]],
    collect: Callable[[], dict[str, Any]],
    receive: Callable[[dict[str, Any]], None],
) -> Manager:
    """Return the manager of this rank. All ranks of the replica group must call this.

    Args:
        rank: this rank in its replica group of ``world_size`` ranks.
        host: name or address of this machine, as peers reach it.
        address: on which the manager's server listens; ``""`` for all.
        store: host and port of the group's own store.
        timeout: longest wait for another group within a step.
        quorum_timeout: longest wait for a quorum.
        transport: sends the state of this rank to a group that joins, and receives it.
        collect: returns the state to send to a group that joins.
        receive: receives such a state; called by ``start_quorum``, in the thread that calls it.
    """
    server = _manager.ManagerServer

    def bound(*, bind: str, **named: Any) -> Any:
        where = f"[{address}]" if ":" in address else address or "[::]"
        return server(bind=f"{where}:{bind.rpartition(':')[2]}", **named)

    _manager.ManagerServer = bound
    try:
        # Quorums are formed at the start of a step, not while it is computed: the share of the batch depends on them.
        made = Manager(
            group,
            load_state_dict=receive,
            state_dict=collect,
            min_replica_size=min_replica_size,
            use_async_quorum=False,
            timeout=timeout,
            quorum_timeout=quorum_timeout,
            rank=rank,
            world_size=world_size,
            store_addr=store[0],
            store_port=store[1],
            lighthouse_addr=lighthouse,
            replica_id=replica_id,
            hostname=host,
            checkpoint_transport=transport,
        )
    finally:
        _manager.ManagerServer = server
    made._client = _Client(made._client)  # noqa: SLF001
    return made


def behind(manager: Manager) -> Behind:
    """Return which groups of the last quorum are behind."""
    found: Behind = manager._client.behind  # noqa: SLF001
    return found


def write_state(state: object, stream: Any) -> None:
    """Write tensors on the CPU and plain values to ``stream``, which has a method ``write``."""
    _streaming_save(state, stream)


def read_state(stream: Any) -> object:
    """Read what :func:`write_state` has written. Nothing in it is executed.

    Args:
        stream: has the methods ``read`` and ``readline``.

    Raises:
        pickle.UnpicklingError: it contains something else than tensors and plain values.
    """
    return _streaming_load(stream, weights_only=True)


def sum_over_groups(manager: Manager, tensor: Tensor) -> None:
    """Sum ``tensor`` over the replica groups of the quorum in place. After an error, which the manager remembers, its values
    are meaningless."""
    manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM).wait()


def lighthouse_server(bind: str, min_replicas: int, join_timeout_ms: int, heartbeat_timeout_ms: int) -> LighthouseServer:
    """Start a lighthouse in this process."""
    return LighthouseServer(
        bind=bind,
        min_replicas=min_replicas,
        join_timeout_ms=join_timeout_ms,
        heartbeat_timeout_ms=heartbeat_timeout_ms,
    )
