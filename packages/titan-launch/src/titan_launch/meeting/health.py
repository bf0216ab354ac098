"""``titan doctor --rdzv-endpoint``: whether this machine can reach the address at which the machines of a job meet."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

from titan_core.api import CheckResult, Health, HealthContext
from titan_launch.meeting.meeting_point import is_here
from titan_launch.meeting.rendezvous import host_and_port

_PATIENCE_SECONDS = 3.0
_SUBJECT = "rendezvous"


def check(context: HealthContext) -> Iterator[CheckResult]:
    """Check the endpoint that the user passed, if any: its name, the route to it, and whether its port is free.

    Raises:
        UserError: the endpoint is neither HOST nor HOST:PORT.
    """
    if not context.endpoint:
        return
    host, port = host_and_port(context.endpoint)
    try:
        yield _listen(port) if is_here(host, port) else _connect(host, port)
    except OSError as error:
        why = f"cannot resolve the host name {host!r}: {error.strerror or error}"
        yield CheckResult(_SUBJECT, Health.ERROR, why, "check the name, or use an IP address")


def _listen(port: int) -> CheckResult:
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        why = f"this machine is the endpoint, but cannot listen on port {port}: {error.strerror or error}"
        return CheckResult(_SUBJECT, Health.ERROR, why, "choose another port, or stop the process that listens on it")
    return CheckResult(_SUBJECT, Health.OK, f"this machine is the endpoint, and port {port} is free")


def _connect(host: str, port: int) -> CheckResult:
    try:
        socket.create_connection((host, port), timeout=_PATIENCE_SECONDS).close()
    except OSError as error:
        if error.errno == errno.ECONNREFUSED:
            return CheckResult(
                _SUBJECT, Health.OK, f"{host} answers; nothing listens on port {port} until titan starts there"
            )
        why = f"{host}:{port} does not answer within {_PATIENCE_SECONDS:g} s ({error.strerror or error})"
        fix = "check the address and the firewall; all machines of a job must reach each other on all ports"
        return CheckResult(_SUBJECT, Health.ERROR, why, fix)
    return CheckResult(
        _SUBJECT, Health.NOTE, f"{host}:{port} accepts connections: a job, or another server, is running there"
    )
