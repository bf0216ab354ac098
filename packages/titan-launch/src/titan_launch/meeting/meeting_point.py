"""Connects a machine to the store where the machines of a job meet, and serves it on the first of them."""

from __future__ import annotations

import os
import signal
import socket
import time
import warnings
from datetime import timedelta
from functools import partial

from titan_core.api import UserError
from titan_core.toolkit.listening import bound_socket, is_local_address, listening_address, serve
from titan_core.toolkit.status import phase
from titan_launch.meeting.handler import Handler
from titan_launch.meeting.rendezvous import Rendezvous, host_and_port

ANSWER_SECONDS = 15.0
"""How long a server that has accepted a connection may take to answer as a torch store does."""


def require_meeting_point(options: Rendezvous, seconds: int | None = None) -> None:
    """Check that the machines can meet at the endpoint. torch would take longer to fail, with a less useful message.

    Args:
        seconds: how long to try to connect (default: :attr:`Rendezvous.connect_seconds`).

    Raises:
        UserError: the host name cannot be resolved, or nothing answers in time.
    """
    if not options.endpoint:
        return
    host, port = host_and_port(options.endpoint)
    where = f"--rdzv-endpoint {options.endpoint}"
    try:
        if is_here(host, port):
            return  # the first process on this machine listens there, and the others connect to it
    except OSError as error:
        why = f"cannot resolve the host name {host!r}: {error.strerror or error}"
        raise UserError.one(where, why, "check the name, or use an IP address") from None
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


def handler(options: Rendezvous, seconds: float = 0.0) -> Handler:
    """Return a handler of the rendezvous, connected to the endpoint.

    A rendezvous that an earlier job has closed is opened again, unless ``seconds`` is given: then a job returns to its own.

    Args:
        seconds: how long to try again if what listens there does not answer, as a server that starts.

    Raises:
        UserError: another kind of server listens at the endpoint, or machines with another key have met there.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # as above

    host, port = host_and_port(options.endpoint)
    where = f"--rdzv-endpoint {options.endpoint}"
    end = time.monotonic() + seconds
    while (listens := _listens(host, port)) and not _answers(host, port):
        if time.monotonic() < end:
            time.sleep(0.5)
            continue
        why = "another server uses this port: it does not answer as a torch rendezvous"
        raise UserError.one(where, why, "choose another port, or stop that server")
    server = None
    if not listens and is_here(host, port):
        address = listening_address(host) if options.bind is None else options.bind
        try:
            server = serve(bound_socket(address, port))
        except OSError as error:
            if not _listens(host, port):  # another process of this machine was faster
                why = f"this machine cannot listen on the port: {error.strerror or error}"
                raise UserError.one(where, why, "choose another port, or another --bind") from None
    patience = timedelta(seconds=options.connect_seconds)
    found = Handler(options, partial(TCPStore, host, port, wait_for_workers=False, timeout=patience), server)
    if not seconds and found.state.closed:
        with phase(f"waiting until an earlier job at {options.endpoint} has ended"):
            found.reopen()
    return found


def is_here(host: str, port: int) -> bool:
    """Whether an endpoint is on this machine.

    Raises:
        OSError: the host name cannot be resolved.
    """
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
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # as above

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
