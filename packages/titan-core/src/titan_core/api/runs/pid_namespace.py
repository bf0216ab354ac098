"""Whether two process ids can be compared: on one machine, containers may number their processes each for itself."""

from __future__ import annotations

import os


def pid_namespace() -> str | None:
    """What this process's id is unique in, besides the machine's name; ``None`` where the system does not say (macOS)."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
