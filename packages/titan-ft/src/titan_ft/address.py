"""Where the other replica groups are, and the address at which they reach this machine. Free of torch."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

from titan_core.toolkit.launching import LOCAL_ADDRESS
from titan_core.toolkit.listening import is_loopback
from titan_ft.config import FaultToleranceSection

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""Environment variable: torchft's name for the address of the lighthouse."""
_LOOPBACK = "127.0.0.1"


def lighthouse_of(section: FaultToleranceSection) -> str:
    """Return the address of the lighthouse; empty if none is set."""
    return section.lighthouse or os.environ.get(LIGHTHOUSE, "")


def own_host(lighthouse: str) -> str:
    """Return the name or address at which the groups that meet at ``lighthouse`` reach this machine.

    It is :data:`~titan_core.toolkit.launching.LOCAL_ADDRESS` if that is set. At a lighthouse on loopback, all groups are on
    this machine. Otherwise it is the fully qualified name of this machine, which pods of another Kubernetes job need, or its
    host name if it has none.
    """
    if given := os.environ.get(LOCAL_ADDRESS):
        return given
    if is_loopback(urlsplit(lighthouse).hostname or ""):
        return _LOOPBACK
    name = socket.gethostname()
    full = socket.getfqdn(name)
    # Resolvers also answer "localhost", or a name made of the address.
    return full if full.startswith(f"{name.partition('.')[0]}.") else name
