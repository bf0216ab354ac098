"""The rendezvous where the machines of a job meet: its options, the connection to its store, and its errors, of one line
each. Imports torch only to connect."""

from __future__ import annotations

import argparse
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from titan_core.api import UserError
from titan_core.toolkit.arguments import parse_integer
from titan_core.toolkit.listening import EVERY_ADDRESS, is_local_address
from titan_core.toolkit.text import shorten
from titan_launch.meeting.signed_store import job_key

DEFAULT_PORT = 29400
"""torch's default port."""
LOOPBACK = "127.0.0.1"
MOST_CONNECT_SECONDS = 60
"""Longest time that a machine tries to connect to the endpoint. Once connected, it waits --rdzv-timeout for the others."""

FEW_MACHINES = 64
"""Up to this number of machines, each reports every second."""
_DEFAULT_CONF = {"last_call_timeout": 30, "keep_alive_interval": 5, "keep_alive_max_attempt": 3}
"""``--rdzv-conf``, named as in torch: how long machines wait for further ones once the least number has joined; how often
they report, in seconds; and how many reports may be missing."""


class RendezvousError(Exception):
    """The machines of a job do not meet."""


class RendezvousClosed(RendezvousError):
    """The job has ended."""


class RendezvousTimeout(RendezvousError):
    """Too few machines have come."""


class RendezvousLost(RendezvousError):
    """The store does not answer."""


@dataclass(frozen=True)
class Rendezvous:
    """The rendezvous options of one machine."""

    endpoint: str = ""
    """Empty for one machine, which meets nobody."""
    run_id: str = ""
    machines: tuple[int, int] = (1, 1)
    timeout: int = 600
    """Seconds."""
    local_addr: str | None = None
    """Address at which the other machines reach this one; ``None``: its host name."""
    bind: str | None = None
    """Address on which this machine listens; ``None``: see :func:`~titan_core.toolkit.listening.listening_address`."""
    key: bytes = b""
    """What the machines of the job share."""
    conf: Mapping[str, int] | None = None
    """``--rdzv-conf``."""

    @property
    def address(self) -> str:
        """Where the other machines reach this one."""
        listens = self.bind if self.bind not in (None, *EVERY_ADDRESS) else None
        return self.local_addr or listens or socket.getfqdn()

    @property
    def connect_seconds(self) -> int:
        """How long to try to connect to the endpoint."""
        return min(self.timeout, MOST_CONNECT_SECONDS)

    @property
    def last_call(self) -> float:
        """Seconds that machines wait for further ones, once the least number has joined."""
        return self._setting("last_call_timeout")

    @property
    def fixed_last_call(self) -> bool:
        """Whether the user has set it."""
        return "last_call_timeout" in (self.conf or {})

    @property
    def interval(self) -> float:
        """Seconds between two reports of a machine."""
        return self._setting("keep_alive_interval")

    @property
    def lost_after(self) -> float:
        """Seconds without a report after which a machine is lost."""
        return self.interval * self._setting("keep_alive_max_attempt")

    def _setting(self, name: str) -> float:
        least, most = self.machines
        few = {"keep_alive_interval": 1, "keep_alive_max_attempt": 6} if least < most <= FEW_MACHINES else {}
        return {**_DEFAULT_CONF, **few, **(self.conf or {})}[name]


def options_of(arguments: argparse.Namespace, least: int, most: int) -> Rendezvous:
    """Return the rendezvous options, checked without waiting for any other machine.

    Raises:
        UserError: the options are invalid or contradict each other.
    """
    timeout, endpoint, local_addr, bind = (
        getattr(arguments, name) for name in ("rdzv_timeout", "rdzv_endpoint", "local_addr", "bind")
    )
    conf = rdzv_conf(arguments.rdzv_conf)
    for option, address in (("--local-addr", local_addr), ("--bind", bind)):
        if address is not None:
            _require_own(option, address)
    if endpoint is not None:
        host_and_port(endpoint)
    if most == 1:  # nobody to meet
        return Rendezvous(timeout=timeout, local_addr=local_addr, bind=bind)
    if endpoint is None:
        why = "several machines need an address to meet at"
        raise UserError.one("--nnodes", why, "add the same --rdzv-endpoint HOST:PORT on every machine")
    key = job_key(arguments.job_key_file, os.environ)
    return Rendezvous(endpoint, arguments.rdzv_id, (least, most), timeout, local_addr, bind, key, conf)


def _require_own(option: str, address: str) -> None:
    """Check an address of this machine.

    Raises:
        UserError: no socket can listen there.
    """
    where, fix = f"{option} {shorten(address)}", "use one of the addresses that `ip addr` shows"
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError.one(where, f"cannot be resolved: {error.strerror or error}", fix) from None
    if not any(is_local_address(family, socket_address) for family, _, _, _, socket_address in found):
        raise UserError.one(where, "is not an address of this machine", fix)


def rdzv_conf(text: str | None) -> dict[str, int]:
    """Return the settings of ``--rdzv-conf``.

    Raises:
        UserError: one is not of the form KEY=VALUE, or there is no such setting.
    """
    found: dict[str, int] = {}
    for setting in filter(None, (text or "").split(",")):
        key, equals, value = (part.strip() for part in setting.partition("="))
        where = f"--rdzv-conf {shorten(setting)}"
        if not key or not equals or not value:
            raise UserError.one(where, "must be KEY=VALUE", "write it as in last_call_timeout=5,keep_alive_interval=1")
        if key not in _DEFAULT_CONF:
            raise UserError.one(where, "the rendezvous has no such setting", f"use one of {', '.join(_DEFAULT_CONF)}")
        number = parse_integer(value, 1, 86_400)
        if number is None:
            raise UserError.one(where, "must be a whole number from 1 to 86400", "use for example 5")
        found[key] = number
    return found


@contextmanager
def rendezvous_errors(options: Rendezvous) -> Iterator[None]:
    """Replace the errors of a rendezvous by errors of one line.

    Raises:
        UserError: the machines do not meet.
    """
    where = f"--rdzv-endpoint {options.endpoint}"
    try:
        yield
    except RendezvousTimeout as error:
        least, _ = options.machines
        why = f"fewer than {least} machines joined within {options.timeout} s (--rdzv-timeout)"
        fix = "start titan on every machine, with the same --nnodes, --rdzv-endpoint and --rdzv-id"
        raise UserError.one(where, why, fix) from error
    except RendezvousClosed as error:
        why = f"the rendezvous {options.run_id!r} is closed: that job has ended"
        raise UserError.one(where, why, "restart titan on every machine with a new --rdzv-id") from error
    except RendezvousLost as error:
        why = f"no rendezvous answers there ({root_cause(error)})"
        fix = "check that the host and the port are right and reachable, and start titan on that machine too"
        raise UserError.one(where, why, fix) from error


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
