"""Signals that control a run: SIGTERM (preemption), SIGHUP (a closed terminal), SIGQUIT, SIGXCPU (a limit of CPU time) and
SIGINT (Ctrl-C) stop it after the current step, SIGUSR1 saves a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from titan_core.api import SharedRequest, hookimpl
from titan_core.toolkit.launching import INTERRUPTED, announce_interrupt, reported_by_launcher
from titan_core.toolkit.status import hide_all

_STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
_REPEATED = (signal.SIGHUP, signal.SIGXCPU)
"""The kernel and the shell each send SIGHUP when a terminal is closed, and the kernel SIGXCPU again after every second of
CPU time. A second one therefore does not end the process at once."""
CLOSING = "titan: the run has ended and is closing its files; press Ctrl-C again to quit at once"


class Interruption:
    """The requests of signals received within the ``with`` block. A second SIGTERM, SIGQUIT or SIGINT ends the process at
    once. SIGHUP, SIGQUIT and SIGXCPU are handled only if their action is the default: under ``nohup``, SIGHUP is ignored.

    Ranks of Titan's launcher ignore further SIGTERMs until they end. The launcher sends one even if each process of the job
    has received one, and SIGKILL to ranks that take too long.

    Until ``titan_train_start`` SIGINT keeps its handler, because there is no step to finish.
    """

    def __init__(self) -> None:
        self.stop = SharedRequest()
        self.interrupt = SharedRequest()
        """The reason for ``stop`` is an interrupt by the user."""
        self.cause = "a signal to another rank"
        """The reason for ``stop`` otherwise, as far as this process knows it."""
        self.save = SharedRequest()
        self._over = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        # Python allows only the main thread to handle signals. In others the handlers stay unchanged.
        if threading.current_thread() is threading.main_thread():
            for number in _STOPS:
                if number is signal.SIGTERM or signal.getsignal(number) is signal.SIG_DFL:
                    self._previous[number] = signal.signal(number, self._on_stop)
            self._previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_usr1)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    @hookimpl(trylast=True)
    def titan_train_start(self) -> None:
        """Let interrupts wait for the end of the step from now on. If SIGINT is ignored (``nohup``, a background job of a
        shell) or handled by an application around the trainer, nothing changes."""
        if self._previous and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._on_int)

    @hookimpl
    def titan_train_end(self) -> None:
        """Note that no step is left to stop, only files to close."""
        self._over = True

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        self.cause = received.name
        self.stop.submit()
        if reported_by_launcher() or received in _REPEATED:
            self._previous.pop(received, None)  # ours stays after the block too: there are files and process groups to close
        else:
            signal.signal(received, self._previous[received])

    def _on_int(self, number: int, frame: FrameType | None) -> None:
        self.interrupt.submit()  # first, so that ranks that agree to stop know the reason
        self.stop.submit()
        # Python would handle the next interrupt only after the current collective or kernel, which may never return.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        hide_all()
        if os.environ.get("RANK", "0") == "0" and not reported_by_launcher():
            announce_interrupt(CLOSING if self._over else INTERRUPTED)

    def _on_usr1(self, number: int, frame: FrameType | None) -> None:
        self.save.submit()
