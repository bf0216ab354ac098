"""Signals to the launcher. SIGTERM, SIGHUP, SIGQUIT and SIGXCPU end the job, SIGINT is for the ranks while there are any.

The launcher leaves a signal alone that was ignored when it started: SIGHUP under ``nohup``, SIGINT and SIGQUIT in the
background of a shell script.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from titan_core.toolkit.errors import Interrupted

_HANDLED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU, signal.SIGINT)


class Terminated(Interrupted):
    """A signal ends the launcher. Not an ``Exception``, because it may interrupt code of plugins and of torch, whose callers
    would take it for a failure of that code and continue."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class Signals:
    """Handles the signals to the launcher within the ``with`` block. Blocks may be nested."""

    def __init__(self, interrupt: Callable[[], bool]) -> None:
        """
        Args:
            interrupt: forwards an interrupt to the ranks; returns whether there are any.
        """
        self._interrupt = interrupt
        self._previous: dict[signal.Signals, Any] = {}
        self._blocks = self._deferrals = 0
        self._received: signal.Signals | None = None

    def __enter__(self) -> Signals:
        self._blocks += 1
        if self._blocks == 1:
            for number in _HANDLED:
                if number is signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        self._blocks -= 1
        if not self._blocks:
            for number, handler in self._previous.items():
                signal.signal(number, handler)
            self._previous.clear()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Complete the block before a signal ends the launcher. For starting and ending ranks: no rank is left behind, and a
        scheduler that repeats SIGTERM does not shorten the time that ranks have to save.

        Raises:
            Terminated: a signal has ended the launcher, in the block or before it.
            KeyboardInterrupt: the same, by SIGINT.
        """
        self._deferrals += 1
        try:
            yield
        finally:
            self._deferrals -= 1
        self._raise()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._interrupt():
            return
        self._received = signal.Signals(number)
        self._raise()

    def _raise(self) -> None:
        if self._received is None or self._deferrals:
            return
        if self._received is signal.SIGINT:
            raise KeyboardInterrupt
        raise Terminated(self._received)
