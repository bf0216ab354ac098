"""The rendezvous where the machines of a job meet: checks its options, and reports its failures in one line each."""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from titan_core.api.errors import UserError
from titan_core.api.tools.arguments import parse_integer
from titan_core.api.tools.phases import phase
from titan_core.api.tools.shown import shorten

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler

DEFAULT_PORT = 29400
"""torch's default port."""
ANSWER_SECONDS = 15.0
"""How long a server that has accepted a connection may take to answer as a torch store does."""
MOST_CONNECT_SECONDS = 60
"""Longest time that a machine tries to connect to the endpoint. Once connected, it waits --rdzv-timeout for the others."""

LOST_SECONDS = 6
"""A machine of an elastic job that has not been heard of for this long is lost (torch: 15 s)."""
FEW_MACHINES = 64
"""Up to this number of machines, each reports every second: the store has one key for all reports."""
_SETTINGS = (
    "join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout", "read_timeout", "keep_alive_interval",
    "keep_alive_max_attempt",
)  # fmt: skip


@dataclass(frozen=True)
class Rendezvous:
    """The rendezvous options of one machine."""

    backend: str
    endpoint: str
    """Empty for one machine without --rdzv-endpoint."""
    run_id: str
    machines: tuple[int, int]
    node_rank: int
    timeout: int
    """Seconds."""
    local_addr: str | None = None
    """Address at which the other machines reach this one; ``None``: its host name."""
    more: Mapping[str, str] = field(default_factory=dict)
    """--rdzv-conf."""

    @property
    def master(self) -> tuple[str | None, int | None]:
        """Host and port of rank 0's store; ``None`` unless the static backend fixes them."""
        return host_and_port(self.endpoint) if self.backend == "static" and self.endpoint else (None, None)

    @property
    def connect_seconds(self) -> int:
        """How long to try to connect to the endpoint."""
        return min(self.timeout, MOST_CONNECT_SECONDS)


def options_of(arguments: argparse.Namespace, least: int, most: int) -> Rendezvous:
    """Return the rendezvous options, checked without waiting for any other machine.

    Raises:
        UserError: the options are invalid or contradict each other.
    """
    timeout = arguments.rdzv_timeout
    endpoint = arguments.rdzv_endpoint
    more = rdzv_conf(arguments.rdzv_conf, arguments.rdzv_backend)
    if arguments.local_addr is not None:
        _require_own(arguments.local_addr)
    if most == 1 and endpoint is None:  # the ranks meet on a free port of this machine
        _node_rank(arguments.node_rank or "0", most)
        if arguments.rdzv_backend != "c10d":
            raise UserError.one(
                f"--rdzv-backend {arguments.rdzv_backend}",
                "needs --rdzv-endpoint",
                "add --rdzv-endpoint HOST:PORT, or drop --rdzv-backend",
            )
        return Rendezvous("c10d", "", "", (1, 1), 0, timeout, arguments.local_addr, more)
    if endpoint is None:
        why = "several machines need an address to meet at"
        raise UserError.one("--nnodes", why, "add the same --rdzv-endpoint HOST:PORT on every machine")
    node_rank = _node_rank(arguments.node_rank or "0", most)
    if arguments.node_rank is not None and arguments.rdzv_backend != "static":
        raise UserError.one(
            f"--node-rank {node_rank}",
            f"has no effect: the {arguments.rdzv_backend} rendezvous numbers the machines itself",
            "drop it, or add --rdzv-backend static",
        )
    if arguments.rdzv_backend == "static" and least != most:
        raise UserError.one(
            f"--nnodes {least}:{most}", "the static rendezvous does not support a range", "use --rdzv-backend c10d"
        )
    if arguments.rdzv_backend in ("c10d", "static"):
        host, _ = host_and_port(endpoint)
        if arguments.rdzv_backend == "static" and ":" not in endpoint:
            raise UserError.one(f"--rdzv-endpoint {endpoint}", "the port is missing", f"add it, as in {host}:29500")
    if arguments.rdzv_backend == "etcd" and least != most:
        raise UserError.one(
            f"--nnodes {least}:{most}", "the etcd rendezvous does not support a range", "use etcd-v2 or c10d"
        )
    backend, run_id = arguments.rdzv_backend, arguments.rdzv_id
    return Rendezvous(backend, endpoint, run_id, (least, most), node_rank, timeout, arguments.local_addr, more)


def _require_own(address: str) -> None:
    """Check an address of this machine. With another one, torch would wait forever.

    Raises:
        UserError: no socket can listen there.
    """
    where, fix = f"--local-addr {shorten(address)}", "use one of the addresses that `ip addr` shows"
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError.one(where, f"cannot be resolved: {error.strerror or error}", fix) from None
    if not any(is_local_address(family, socket_address) for family, _, _, _, socket_address in found):
        raise UserError.one(where, "is not an address of this machine", fix)


def rdzv_conf(text: str | None, backend: str) -> dict[str, str]:
    """Return the settings of ``--rdzv-conf``.

    Raises:
        UserError: one is not of the form KEY=VALUE, or the c10d rendezvous does not have it.
    """
    found: dict[str, str] = {}
    for setting in filter(None, (text or "").split(",")):
        key, equals, value = (part.strip() for part in setting.partition("="))
        where = f"--rdzv-conf {shorten(setting)}"
        if not key or not equals or not value:
            raise UserError.one(where, "must be KEY=VALUE", "write it as in last_call_timeout=5,keep_alive_interval=1")
        if backend == "c10d" and key not in _SETTINGS:
            raise UserError.one(where, "the c10d rendezvous has no such setting", f"use one of {', '.join(_SETTINGS)}")
        if backend == "c10d" and parse_integer(value, 1, 86_400) is None:
            raise UserError.one(where, "must be a whole number from 1 to 86400", "use for example 5")
        found[key] = value
    return found


def require_meeting_point(options: Rendezvous, seconds: int | None = None) -> None:
    """Check that the machines can meet at the endpoint. torch would take longer to fail, with a less useful message.

    Args:
        seconds: how long to try to connect (default: :attr:`Rendezvous.connect_seconds`).

    Raises:
        UserError: the host name cannot be resolved, nothing answers in time, or the port is in use.
    """
    if not options.endpoint or options.backend not in ("c10d", "static"):
        return
    host, port = host_and_port(options.endpoint)
    where = f"--rdzv-endpoint {options.endpoint}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        why = f"cannot resolve the host name {host!r}: {error.strerror or error}"
        raise UserError.one(where, why, "check the name, or use an IP address") from None
    if options.backend == "static" and options.node_rank == 0:
        # torch listens on all addresses.
        try:
            socket.create_server(("", port)).close()
        except OSError as error:
            fix = "choose another port, or stop the process that listens on it; only one machine may have --node-rank 0"
            why = f"this machine cannot listen on the port: {error.strerror or error}"
            raise UserError.one(where, why, fix) from None
        return
    if options.backend == "c10d" and any(is_local_address(family, address) for family, _, _, _, address in found):
        return  # the first process on this machine listens there, and the others connect to it
    seconds = seconds or options.connect_seconds
    end = time.monotonic() + seconds
    with phase(f"connecting to {options.endpoint}", lambda: f"tries for {seconds} s", repeat_seconds=10.0):
        while True:
            try:
                socket.create_connection((host, port), timeout=max(0.1, end - time.monotonic())).close()
                return
            except OSError as error:
                if time.monotonic() >= end:
                    why = f"nothing answered within {seconds} s ({error.strerror or error})"
                    fix = "check the host and the port, and start titan on that machine too; see --rdzv-timeout"
                    raise UserError.one(where, why, fix) from None
            time.sleep(min(0.5, max(0.0, end - time.monotonic())))


def is_local_address(family: int, address: tuple[Any, ...]) -> bool:
    """Whether a socket on this machine can bind to the address."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True


def handler(options: Rendezvous, unique: str, seconds: float = 0.0) -> RendezvousHandler:
    """Return torch's rendezvous handler, connected to the endpoint.

    A rendezvous that an earlier job has closed is opened again, unless ``seconds`` is given: then a job returns to its own.

    Args:
        unique: rendezvous ID for a job on one machine.
        seconds: how long to try again if what listens there does not answer, as a server that starts.

    Raises:
        UserError: another kind of server listens at the endpoint. torch would wait for its answer forever.
    """
    if not options.endpoint or options.backend not in ("c10d", "static"):
        return _handler(options, unique)
    host, port = host_and_port(options.endpoint)
    end = time.monotonic() + seconds
    while (listens := _listens(host, port)) and not _answers(host, port):
        if time.monotonic() < end:
            time.sleep(0.5)
            continue
        where = f"--rdzv-endpoint {options.endpoint}"
        why = "another server uses this port: it does not answer as a torch rendezvous"
        raise UserError.one(where, why, "choose another port, or stop that server")
    if options.backend == "c10d" and listens and not seconds:
        from titan_launch.torch_private import reopen

        found = _handler(options, unique)
        with phase(f"waiting until an earlier job at {options.endpoint} has ended"), rendezvous_errors(options):
            reopen(found)
        return found
    if options.backend == "c10d" and not listens and _is_own(host, port):
        from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

        # torch would compare the endpoint with the addresses of the host name, and this machine may have others.
        with suppress(RendezvousConnectionError):  # another process of this machine was faster
            return _handler(options, unique, is_host=True)
    return _handler(options, unique)


def _is_own(host: str, port: int) -> bool:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return any(is_local_address(family, address) for family, _, _, _, address in found)


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=ANSWER_SECONDS).close()
    except OSError:
        return False
    return True


def _answers(host: str, port: int) -> bool:
    """Return whether a torch store answers. A child process tries it: a thread could not be ended while torch waits, and
    would crash the interpreter at its exit."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, but not exported to type checkers

    with warnings.catch_warnings():
        # Python warns of threads that hold locks. The child takes none of theirs, and never returns to Python's exit.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        failed = True  # sys.exc_info() would show what the caller of this function handles, too
        try:
            TCPStore(host, port, timeout=timedelta(seconds=ANSWER_SECONDS), wait_for_workers=False)
            failed = False
        finally:
            os._exit(failed)
    end = time.monotonic() + ANSWER_SECONDS
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.02)


def _handler(options: Rendezvous, unique: str, is_host: bool = False) -> RendezvousHandler:
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    least, most = options.machines
    more: dict[str, Any] = {"timeout": options.timeout}
    if options.backend == "static":
        more["rank"] = options.node_rank
    elif options.backend == "c10d":
        more |= {"join_timeout": options.timeout, "read_timeout": options.connect_seconds}
    if least < most:
        interval = 1 if most <= FEW_MACHINES else 5
        more |= {"keep_alive_interval": interval, "keep_alive_max_attempt": max(3, LOST_SECONDS // interval)}
    if is_host:
        more["is_host"] = True
    more |= options.more
    endpoint, run_id = (options.endpoint, options.run_id) if options.endpoint else ("localhost:0", unique)
    parameters = RendezvousParameters(options.backend, endpoint, run_id, least, most, options.local_addr, **more)
    return get_rendezvous_handler(parameters)


@contextmanager
def rendezvous_errors(options: Rendezvous) -> Iterator[None]:
    """Replace torch's rendezvous errors by errors of one line.

    Raises:
        UserError: torch raised a rendezvous error inside the context.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous.api import (
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousError,
        RendezvousTimeoutError,
    )

    where = f"--rdzv-endpoint {options.endpoint}" if options.endpoint else "the ranks of this machine"
    try:
        yield
    except RendezvousTimeoutError as error:
        least, _ = options.machines
        why = f"fewer than {least} machines joined within {options.timeout} s (--rdzv-timeout)"
        fix = "start titan on every machine, with the same --nnodes, --rdzv-endpoint and --rdzv-id"
        raise UserError.one(where, why, fix) from error
    except RendezvousClosedError as error:
        why = f"the rendezvous {options.run_id!r} is closed: that job has ended"
        raise UserError.one(where, why, "restart titan on every machine with a new --rdzv-id") from error
    except (RendezvousError, DistError) as error:
        cause = root_cause(error)
        if "address already in use" in cause.lower() or "EADDRINUSE" in cause:
            fix = "choose another port, or stop the process that listens on it"
            if options.backend == "static":
                fix += "; only one machine may have --node-rank 0"
            raise UserError.one(where, "the port is in use on this machine", fix) from error
        if "clients joined" in cause:
            why = f"not all {options.machines[0]} machines joined within {options.timeout} s (--rdzv-timeout)"
            fix = "start titan on every machine, each with a different --node-rank"
            raise UserError.one(where, why, fix) from error
        if isinstance(error, RendezvousConnectionError | DistError):
            why = f"no rendezvous answers there ({cause})"
            fix = "check that the host and the port are right and reachable, and start titan on that machine too"
            raise UserError.one(where, why, fix) from error
        raise UserError.one(where, f"the rendezvous failed ({cause})", "check --rdzv-backend and its options") from error


def root_cause(error: BaseException) -> str:
    """Return the message of the root cause, without torch's C++ stack and source location."""
    while error.__cause__ is not None:
        error = error.__cause__
    return re.sub(
        r"^\[[^\]]*\.cpp:\d+\]\s*", "", str(error).partition("\n")[0].partition(" Exception raised from")[0]
    ).strip()


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Split an endpoint into host and port.

    Raises:
        UserError: ``endpoint`` is neither HOST nor HOST:PORT.
    """
    host, _, port = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", str(DEFAULT_PORT))
    number = parse_integer(port, 1, 65535)
    if not host or number is None:
        raise UserError.one(f"--rdzv-endpoint {shorten(endpoint)}", "must be HOST:PORT", "write it as in node0:29500")
    return host.removeprefix("[").removesuffix("]"), number


def _node_rank(text: str, most: int) -> int:
    number = parse_integer(text, 0, most - 1)
    if number is None:
        allowed = "0" if most == 1 else f"a whole number from 0 to {most - 1}"
        why = f"must be {allowed}, because --nnodes is {most}"
        raise UserError.one(f"--node-rank {shorten(text)}", why, "give each machine a different rank")
    return number
