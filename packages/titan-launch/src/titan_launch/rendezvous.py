"""The rendezvous where the machines of a job meet: checks its options, and reports its failures in one line each."""

from __future__ import annotations

import argparse
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from titan_core.api.errors import UserError
from titan_core.api.tools.arguments import parse_integer
from titan_core.api.tools.shown import shorten

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler

DEFAULT_PORT = 29400
"""torch's default port."""
PATIENCE_SECONDS = 5.0
"""Time by which torch may exceed its own timeout when it connects to the endpoint."""
MOST_CONNECT_SECONDS = 60
"""Longest time that a machine tries to connect to the endpoint. Once connected, it waits --rdzv-timeout for the others."""


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
    if most == 1 and endpoint is None:  # the ranks meet on a free port of this machine
        _node_rank(arguments.node_rank or "0", most)
        if arguments.rdzv_backend != "c10d":
            raise UserError.one(
                f"--rdzv-backend {arguments.rdzv_backend}",
                "needs --rdzv-endpoint",
                "add --rdzv-endpoint HOST:PORT, or drop --rdzv-backend",
            )
        return Rendezvous("c10d", "", "", (1, 1), 0, timeout)
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
    return Rendezvous(arguments.rdzv_backend, endpoint, arguments.rdzv_id, (least, most), node_rank, timeout)


def require_meeting_point(options: Rendezvous) -> None:
    """Check that the machines can meet at the endpoint. torch would take longer to fail, with a less useful message.

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
    end = time.monotonic() + options.connect_seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, end - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() >= end:
                why = f"nothing answered within {options.connect_seconds} s ({error.strerror or error})"
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


def handler(options: Rendezvous, unique: str) -> RendezvousHandler:
    """Return torch's rendezvous handler, connected to the endpoint.

    Args:
        unique: rendezvous ID for a job on one machine.

    Raises:
        UserError: another kind of server listens at the endpoint. torch would wait for its answer forever.
    """
    made: Future[RendezvousHandler] = Future()

    def make() -> None:
        try:
            made.set_result(_handler(options, unique))
        except Exception as error:  # noqa: BLE001 - raised again by result()
            made.set_exception(error)

    threading.Thread(target=make, name="rendezvous", daemon=True).start()
    try:
        return made.result(2 * options.connect_seconds + PATIENCE_SECONDS)  # torch tries twice: to listen, and to connect
    except TimeoutError as error:
        if made.done():  # raised by torch
            raise
        why = "the server that listens there is not a torch rendezvous"
        raise UserError.one(f"--rdzv-endpoint {options.endpoint}", why, "choose another port") from error


def _handler(options: Rendezvous, unique: str) -> RendezvousHandler:
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, but not exported to type checkers
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    least, most = options.machines
    more: dict[str, Any] = {"timeout": options.timeout}
    if options.backend == "static":
        more["rank"] = options.node_rank
        if options.node_rank > 0 and options.endpoint:  # the static handler connects only later
            host, port = host_and_port(options.endpoint)
            TCPStore(host, port, timeout=timedelta(seconds=options.connect_seconds), wait_for_workers=False)
    elif options.backend == "c10d":
        more |= {"join_timeout": options.timeout, "read_timeout": options.connect_seconds}
    endpoint, run_id = (options.endpoint, options.run_id) if options.endpoint else ("localhost:0", unique)
    parameters = RendezvousParameters(options.backend, endpoint, run_id, least, most, **more)
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
        cause = _root(error)
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


def _root(error: BaseException) -> str:
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
