"""For processes that a test interrupts."""

from __future__ import annotations

import signal


def interruptible() -> None:
    """As ``preexec_fn``: a shell lets what it starts in the background ignore interrupts, and tests may be part of that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
