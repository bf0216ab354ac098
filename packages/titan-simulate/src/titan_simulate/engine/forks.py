"""Calls in forks of this process.

A simulation changes its process for good (torch believes in devices that do not exist), so it needs one of its own. A fork
takes milliseconds; a new process would import torch for seconds. Forking is safe while this process has one thread and has
not used the device.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from titan_core.toolkit.plugin_files import load_plugin_files
from titan_core.toolkit.processes import end_with_parent, environment_of_child
from titan_simulate.engine import stub_libraries

T = TypeVar("T")

PRELOADED = (
    "titan_simulate.engine.simulate",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch._dynamo",  # the first optimizer would import it
    "torch._dynamo.backends.common",  # and whoever asks for the compiler's backends
)


class RemoteError(RuntimeError):
    """A call failed in its process. The message is the traceback there."""


def load(on_cpu: bool = False) -> None:
    """Make this process simulate devices, unless ``on_cpu``, and import what every simulation needs, before it forks."""
    if not on_cpu:
        stub_libraries.load()
    load_plugin_files()
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # a collection in a child would copy every page with an object


def call_in_fork(function: Callable[[], T]) -> T:
    """Return the result of ``function``, called in a fork of this process (:func:`call_in_forks`)."""
    return call_in_forks([function])[0]


def describe_first(assemble: Callable[[], object]) -> None:
    """Assemble a job in a fork of this process. To describe itself, a model may import torch and compute with it (those of
    transformers do, until this machine has derived them once), which a process that shall simulate cannot have done.

    Raises:
        UserError: the job is not valid.
    """

    def assembled() -> None:
        assemble()

    call_in_fork(assembled)


def call_in_forks(
    functions: Sequence[Callable[[], T]], at_once: int = 1, done: Callable[[int], None] = lambda number: None
) -> list[T]:
    """Return the results of ``functions``, each called in a fork of this process, which must be single-threaded. What they
    do to their process, such as loading the stub libraries, does not affect this one.

    Args:
        at_once: most forks at a time. They start in the order of ``functions``.
        done: receives the number of those that have ended, after each.

    Raises:
        Exception: the exception that a function raised, caused by a :class:`RemoteError` with its traceback. The other forks
            are ended.
        RemoteError: a process died.
    """
    sys.stdout.flush()  # the fork would print what is buffered a second time
    sys.stderr.flush()
    found: dict[int, T] = {}
    running: dict[Connection, tuple[int, int]] = {}
    try:
        for number, function in enumerate(functions):
            if len(running) == at_once:
                _collect(running, found)
                done(len(found))
            pipe, child = begin(function)
            running[pipe] = number, child
        while running:
            _collect(running, found)
            done(len(found))
    finally:
        for pipe, (_, child) in running.items():
            os.kill(child, signal.SIGKILL)
            received(pipe, child)
    return [found[number] for number in range(len(functions))]


def _collect(running: dict[Connection, tuple[int, int]], found: dict[int, Any]) -> None:
    """Wait until a fork has a result, and add it to ``found``."""
    for pipe in wait(list(running)):
        assert isinstance(pipe, Connection)
        number, child = running.pop(pipe)
        found[number] = opened(received(pipe, child))


def opened(answer: bytes) -> Any:
    """Return the result in the answer of a fork, or raise the exception in it."""
    ok, value, text = pickle.loads(answer)
    if ok:
        return value
    if isinstance(value, BaseException):
        raise value from RemoteError(text)
    raise RemoteError(text)


def begin(function: Callable[[], Any]) -> tuple[Connection, int]:
    """Call ``function`` in a fork of this process. Return the pipe that its pickled result comes from, and its id."""
    ours, theirs = Pipe(duplex=False)
    parent = environment_of_child()
    # An interrupt in between would be a traceback, or be lost: what runs around a fork swallows exceptions.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    child = os.fork()
    if child == 0:
        # A terminal interrupts all processes; those that wait for forks decide what becomes of them.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        ours.close()
        os.environ.update(parent)
        end_with_parent()
        _answer(theirs, function)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    theirs.close()
    return ours, child


def received(pipe: Connection, child: int) -> bytes:
    """Wait for the pickled result of a fork, and for its end."""
    try:
        answer = pipe.recv_bytes()
    except (EOFError, OSError):  # the process died, maybe while it sent the result
        answer = b""
    finally:
        pipe.close()
        _, status = os.waitpid(child, 0)
    if not answer:
        answer = pickle.dumps((False, None, f"the process died (exit code {os.waitstatus_to_exitcode(status)})"))
    return answer


class Forker:
    """A fork of this process that answers calls of one function, and forks others for them. It stays as small as this
    process is now, so that what this one learns later slows no fork down."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._pipe, theirs = Pipe()
        self._answers, self._child = begin(partial(_serve, theirs, self._pipe, function))
        theirs.close()

    def __call__(self, *arguments: Any, meanwhile: Callable[[], None] = lambda: None) -> Any:
        """Return the result of the function. Arguments and result are pickled.

        Args:
            meanwhile: called while the other process works.

        Raises:
            Exception: the exception that it raised (:func:`call_in_forks`).
        """
        self._pipe.send(arguments)
        meanwhile()
        return opened(self._pipe.recv_bytes())

    def close(self) -> None:
        """End the process, with the forks that it has."""
        os.kill(self._child, signal.SIGKILL)
        received(self._answers, self._child)
        self._pipe.close()


def _serve(pipe: Connection, other: Connection, function: Callable[..., Any]) -> None:
    other.close()
    while True:
        try:
            arguments = pipe.recv()
        except EOFError:
            return
        pipe.send_bytes(_answer_of(partial(function, *arguments)))


def _answer_of(function: Callable[[], Any]) -> bytes:
    """Return the pickled result of ``function``, or what it raised."""
    try:
        return pickle.dumps((True, function(), ""))
    except BaseException as error:  # noqa: BLE001 - raised by the caller
        text = traceback.format_exc()
        try:
            answer = pickle.dumps((False, error, text))
            pickle.loads(answer)
        except Exception:  # noqa: BLE001 - an exception that cannot be pickled
            answer = pickle.dumps((False, None, text))
        return answer


def _answer(pipe: Connection, function: Callable[[], Any]) -> None:
    """Call ``function``, send its result and end this process."""
    answer = _answer_of(function)
    pipe.send_bytes(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # torch's threads and libraries would look for the driver as they end
