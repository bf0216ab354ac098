"""Signals that request something of a run: SIGTERM to stop after the present step (preemption), SIGINT (Ctrl-C) likewise,
SIGUSR1 to save a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from titan_core.api.hookspecs import hookimpl
from titan_core.api.launcher import INTERRUPTED, announce_interrupt, reported_by_launcher
from titan_core.api.shared_request import SharedRequest

CLOSING = "titan: the run is over, and its files are being closed; Ctrl-C again ends at once"


class Interruption:
    """What signals have requested since it was entered. A second SIGTERM or SIGINT ends the process at once.

    Until ``titan_train_start`` SIGINT does what it did: there is nothing to finish yet.
    """

    def __init__(self) -> None:
        self.stop = SharedRequest()
        self.interrupt = SharedRequest()
        """Why to stop: a person has interrupted the run."""
        self.save = SharedRequest()
        self._over = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        # Python lets no other thread handle signals; there, they do what they did.
        if threading.current_thread() is threading.main_thread():
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._on_term)
            self._before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_usr1)
        return self

    def __exit__(self, *error: object) -> None:
        for which, handler in self._before.items():
            signal.signal(which, handler)
        self._before.clear()

    @hookimpl(trylast=True)
    def titan_train_start(self) -> None:
        """From now on an interrupt waits for the end of the step. One that is ignored (``nohup``, a shell's background
        job) or handled by an application around the trainer is left as it is."""
        if self._before and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._on_int)

    @hookimpl
    def titan_train_end(self) -> None:
        """Nothing is left to stop; what remains is to close."""
        self._over = True

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        self.stop.ask()
        signal.signal(signal.SIGTERM, self._before[signal.SIGTERM])

    def _on_int(self, number: int, frame: FrameType | None) -> None:
        self.interrupt.ask()  # first: ranks that agree to stop must know why
        self.stop.ask()
        # Python would handle the next one only once a collective or a kernel returns, which it may never do.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if os.environ.get("RANK", "0") == "0" and not reported_by_launcher():
            announce_interrupt(CLOSING if self._over else INTERRUPTED)

    def _on_usr1(self, number: int, frame: FrameType | None) -> None:
        self.save.ask()
