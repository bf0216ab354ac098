"""The address at which the peers of a replica group reach this machine. Free of torch."""

from __future__ import annotations

import os
import socket

from titan_core.toolkit.launching import LOCAL_ADDRESS


def own_host() -> str:
    """Return :data:`~titan_core.toolkit.launching.LOCAL_ADDRESS` if it is set. Else return the fully qualified name of this
    machine, which pods of another Kubernetes job need, or its host name if it has none."""
    if given := os.environ.get(LOCAL_ADDRESS):
        return given
    name = socket.gethostname()
    full = socket.getfqdn(name)
    # Resolvers also answer "localhost", or a name made of the address.
    return full if full.startswith(f"{name.partition('.')[0]}.") else name
