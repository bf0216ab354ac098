"""Where the machines of a job meet: the options, checked, and what fails there in one line."""

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
from titan_core.api.tools.arguments import parse_whole
from titan_core.api.tools.shown import shorten

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler

DEFAULT_PORT = 29400
"""Torch's."""
PATIENCE_SECONDS = 5.0
"""How much longer than it should torch may take to reach the meeting point."""
MOST_CONNECT_SECONDS = 60
"""How long a machine tries to reach the meeting point, at most. There it waits for others as long as --rdzv-timeout says."""


@dataclass(frozen=True)
class Rendezvous:
    """The options of one machine."""

    backend: str
    endpoint: str
    """Empty where there is one machine, and none was given."""
    run_id: str
    machines: tuple[int, int]
    node_rank: int
    timeout: int
    """Seconds."""

    @property
    def master(self) -> tuple[str | None, int | None]:
        """Host and port of rank 0's store, where the options say so."""
        return _host_and_port(self.endpoint) if self.backend == "static" and self.endpoint else (None, None)

    @property
    def connect_seconds(self) -> int:
        """How long to try to reach the meeting point."""
        return min(self.timeout, MOST_CONNECT_SECONDS)


def options_of(arguments: argparse.Namespace, least: int, most: int) -> Rendezvous:
    """The options, checked before anything is waited for.

    Raises:
        UserError: they cannot work.
    """
    timeout = arguments.rdzv_timeout
    endpoint = arguments.rdzv_endpoint
    if most == 1 and endpoint is None:  # its ranks meet on a port of this machine's that is free
        _node_rank(arguments.node_rank, most)
        if arguments.rdzv_backend != "c10d":
            raise UserError.one(f"--rdzv-backend {arguments.rdzv_backend}", "needs --rdzv-endpoint", "leave it out")
        return Rendezvous("c10d", "", "", (1, 1), 0, timeout)
    if endpoint is None:
        why = "several machines need a place to meet"
        raise UserError.one("--nnodes", why, "give --rdzv-endpoint HOST:PORT, the same on each")
    node_rank = _node_rank(arguments.node_rank, most)
    if arguments.rdzv_backend == "static" and least != most:
        raise UserError.one(f"--nnodes {least}:{most}", "the static rendezvous takes no range", "use --rdzv-backend c10d")
    if arguments.rdzv_backend in ("c10d", "static"):
        host, _ = _host_and_port(endpoint)
        if arguments.rdzv_backend == "static" and ":" not in endpoint:
            raise UserError.one(f"--rdzv-endpoint {endpoint}", "the port is missing", f"for example {host}:29500")
    return Rendezvous(arguments.rdzv_backend, endpoint, arguments.rdzv_id, (least, most), node_rank, timeout)


def require_meeting_point(options: Rendezvous) -> None:
    """Find out whether the machines can meet there, before torch does: it takes longer, and says less.

    Raises:
        UserError: the name is unknown, nothing answers in time, or the port is in use.
    """
    if not options.endpoint or options.backend not in ("c10d", "static"):
        return
    host, port = _host_and_port(options.endpoint)
    where = f"--rdzv-endpoint {options.endpoint}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        why = f"the name {host!r} cannot be resolved: {error.strerror or error}"
        raise UserError.one(where, why, "check the name, or give an address") from None
    if options.backend == "static" and options.node_rank == 0:
        # Torch listens on all addresses.
        try:
            socket.create_server(("", port)).close()
        except OSError as error:
            fix = "choose another port, or end what listens there; another machine must not have --node-rank 0 too"
            raise UserError.one(where, f"this machine cannot listen there: {error.strerror or error}", fix) from None
        return
    if options.backend == "c10d" and any(_is_of_this_machine(family, address) for family, _, _, _, address in found):
        return  # the first process here listens, the others meet it
    end = time.monotonic() + options.connect_seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, end - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() >= end:
                why = f"nothing answered within {options.connect_seconds} s ({error.strerror or error})"
                fix = "check host and port, and that titan was started on the machine that they name; see --rdzv-timeout"
                raise UserError.one(where, why, fix) from None
        time.sleep(min(0.5, max(0.0, end - time.monotonic())))


def _is_of_this_machine(family: int, address: tuple[Any, ...]) -> bool:
    """Whether a socket of this machine can have the address."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True


def handler(options: Rendezvous, unique: str) -> RendezvousHandler:
    """Torch's, which meets the other machines.

    Args:
        unique: a name for a job of one machine.

    Raises:
        UserError: what listens at the meeting point is something else: torch would wait for its answer without end.
    """
    made: Future[RendezvousHandler] = Future()

    def make() -> None:
        try:
            made.set_result(_handler(options, unique))
        except Exception as error:  # noqa: BLE001 - raised where the result is waited for
            made.set_exception(error)

    threading.Thread(target=make, name="rendezvous", daemon=True).start()
    try:
        return made.result(2 * options.connect_seconds + PATIENCE_SECONDS)  # torch tries twice: to listen, and to connect
    except TimeoutError as error:
        if made.done():  # torch's own
            raise
        why = "what listens there is no rendezvous of torch's"
        raise UserError.one(f"--rdzv-endpoint {options.endpoint}", why, "choose another port") from error


def _handler(options: Rendezvous, unique: str) -> RendezvousHandler:
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, but not exported to type checkers
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    least, most = options.machines
    more: dict[str, Any] = {"timeout": options.timeout}
    if options.backend == "static":
        more["rank"] = options.node_rank
        if options.node_rank > 0 and options.endpoint:  # the handler itself connects only later
            host, port = _host_and_port(options.endpoint)
            TCPStore(host, port, timeout=timedelta(seconds=options.connect_seconds), wait_for_workers=False)
    elif options.backend == "c10d":
        more |= {"join_timeout": options.timeout, "read_timeout": options.connect_seconds}
    endpoint, run_id = (options.endpoint, options.run_id) if options.endpoint else ("localhost:0", unique)
    parameters = RendezvousParameters(options.backend, endpoint, run_id, least, most, **more)
    return get_rendezvous_handler(parameters)


@contextmanager
def rendezvous_errors(options: Rendezvous) -> Iterator[None]:
    """Say in one line what fails where machines meet.

    Raises:
        UserError: in place of torch's errors.
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
        why = f"fewer than {least} machines came within {options.timeout} s (--rdzv-timeout)"
        fix = "start titan on every machine, with the same --nnodes, --rdzv-endpoint and --rdzv-id"
        raise UserError.one(where, why, fix) from error
    except RendezvousClosedError as error:
        why = f"the rendezvous {options.run_id!r} is over: that job has ended"
        raise UserError.one(where, why, "start every machine again, with another --rdzv-id") from error
    except (RendezvousError, DistError) as error:
        cause = _root(error)
        if "address already in use" in cause.lower() or "EADDRINUSE" in cause:
            fix = "choose another port, or end the process that listens there"
            if options.backend == "static":
                fix += "; or another machine has --node-rank 0 too"
            raise UserError.one(where, "the port is in use on this machine", fix) from error
        if "clients joined" in cause:
            why = f"not all of {options.machines[0]} machines came within {options.timeout} s (--rdzv-timeout)"
            fix = "start titan on every machine, each with a --node-rank of its own"
            raise UserError.one(where, why, fix) from error
        if isinstance(error, RendezvousConnectionError | DistError):
            why = f"nothing that machines can meet at answers there ({cause})"
            fix = "check that host and port are right and reachable, and that the machine that they name was started too"
            raise UserError.one(where, why, fix) from error
        raise UserError.one(where, f"the rendezvous failed ({cause})", "check --rdzv-backend and its options") from error


def _root(error: BaseException) -> str:
    """What it came from, without torch's C++ stack and place."""
    while error.__cause__ is not None:
        error = error.__cause__
    return re.sub(
        r"^\[[^\]]*\.cpp:\d+\]\s*", "", str(error).partition("\n")[0].partition(" Exception raised from")[0]
    ).strip()


def _host_and_port(endpoint: str) -> tuple[str, int]:
    """
    Raises:
        UserError: not a host and a port.
    """
    host, _, port = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", str(DEFAULT_PORT))
    number = parse_whole(port, 1, 65535)
    if not host or number is None:
        raise UserError.one(f"--rdzv-endpoint {shorten(endpoint)}", "must be HOST:PORT", "for example node0:29500")
    return host.removeprefix("[").removesuffix("]"), number


def _node_rank(text: str, most: int) -> int:
    number = parse_whole(text, 0, most - 1)
    if number is None:
        least = "0" if most == 1 else f"a whole number from 0 to {most - 1}"
        why = f"must be {least}, since --nnodes is {most}"
        raise UserError.one(f"--node-rank {shorten(text)}", why, "give each machine a number of its own")
    return number
