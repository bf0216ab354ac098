"""The addresses on which a process listens."""

from __future__ import annotations

import ipaddress
import os
import struct
from pathlib import Path

LISTEN = "0A"
"""State of a socket in ``/proc/net/tcp``."""


def listening(pid: int) -> set[str]:
    """Return the addresses on which a process listens."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:  # it has been closed
            continue
        if target.startswith("socket:["):
            inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTEN and rest[5] in inodes:
                found.add(address_of(local.partition(":")[0]))
    return found


def address_of(text: str) -> str:
    """Return an address of ``/proc/net/tcp``, whose words are those of the machine."""
    words = [struct.pack("=I", int(text[at : at + 8], 16)) for at in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
