"""Sockets and stores that listen on the addresses that their peers need, and on no others. Imports torch only to serve."""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import Any

EVERY_ADDRESS = ("0.0.0.0", "::")


def is_local_address(family: int, address: tuple[Any, ...]) -> bool:
    """Whether a socket on this machine can bind to the address."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True


def listening_address(host: str) -> str:
    """Return the address of this machine on which others find what they look for at ``host``: its own one of that name, or
    all of them (``""``) if the name means loopback here only, as host names do on Debian, or no address of this machine."""
    try:
        found = [(family, address) for family, *_, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)]
    except OSError:
        return ""
    others = [str(where[0]) for family, where in found if not is_loopback(str(where[0])) and is_local_address(family, where)]
    if others:
        return others[0]
    return str(found[0][1][0]) if is_loopback(host) else ""


def is_loopback(host: str) -> bool:
    """Whether a host means the machine itself wherever it is used."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def bound_socket(address: str, port: int = 0) -> socket.socket:
    """Return a socket for a store to listen on. Nothing connects to it before the store is there.

    Args:
        address: of this machine; ``""`` for all.

    Raises:
        OSError: it cannot be bound.
    """
    every = not address and socket.has_dualstack_ipv6()
    family, *_, where = socket.getaddrinfo(address or ("::" if every else "0.0.0.0"), port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if every:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(where)
    except OSError:
        bound.close()
        raise
    return bound


def serve(bound: socket.socket) -> Any:
    """Return a torch store that listens on a bound socket, and on no other address."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, but not exported to type checkers

    address, port = bound.getsockname()[:2]
    host = "localhost" if address in EVERY_ADDRESS else address  # where this process connects to it
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=bound.detach())


def loopback_networks() -> dict[str, str]:
    """Return the environment variables that keep gloo and NCCL to loopback, but for those that are set."""
    names = [name for _, name in socket.if_nameindex()]
    interface = next((name for name in ("lo", "lo0") if name in names), "lo")
    return {name: interface for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in os.environ}
