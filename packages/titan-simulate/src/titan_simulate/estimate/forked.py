"""Calls a function in a fork of this process. Simulations change their process for good, so each has its own."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from typing import TypeVar

T = TypeVar("T")


def start(function: Callable[[], T]) -> Callable[[], T]:
    """Call ``function`` in a fork; return a function that waits for its result.

    The process must be single-threaded and must not have used the device. The result must be picklable.

    Raises:
        Exception: (the returned function) what ``function`` raised, or a ``RuntimeError`` if the fork died.
    """
    ours, theirs = Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        ours.close()
        try:
            try:
                answer = pickle.dumps((True, function(), ""))
            except BaseException as error:  # noqa: BLE001 - raised by the parent
                answer = _failure(error)
            theirs.send_bytes(answer)
        finally:
            os._exit(0)  # torch's libraries would look for the driver as they end
    theirs.close()

    def result() -> T:
        try:
            answer = ours.recv_bytes()
        except EOFError:
            answer = b""
        _, status = os.waitpid(child, 0)
        if not answer:
            raise RuntimeError(f"the simulating process died (exit code {os.waitstatus_to_exitcode(status)})")
        ok, value, text = pickle.loads(answer)
        if ok:
            found: T = value
            return found
        if isinstance(value, BaseException):
            raise value from RuntimeError(text)
        raise RuntimeError(text)

    return result


def _failure(error: BaseException) -> bytes:
    text = traceback.format_exc()
    try:
        answer = pickle.dumps((False, error, text))
        pickle.loads(answer)
    except Exception:  # noqa: BLE001 - an exception that cannot be pickled
        answer = pickle.dumps((False, None, text))
    return answer
