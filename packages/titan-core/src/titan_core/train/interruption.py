"""Signals that ask a run for something: SIGTERM to stop after the present step (preemption), SIGUSR1 for a checkpoint."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from titan_core.train.shared_request import SharedRequest


class Interruption:
    """What signals have asked for since it was entered. A second SIGTERM ends the process at once."""

    def __init__(self) -> None:
        self.stop = SharedRequest()
        self.save = SharedRequest()
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

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        self.stop.ask()
        signal.signal(signal.SIGTERM, self._before[signal.SIGTERM])

    def _on_usr1(self, number: int, frame: FrameType | None) -> None:
        self.save.ask()
