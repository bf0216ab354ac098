"""A process that simulates: it imports torch with the stub libraries once, and forks for each call.

Tests need it because they have imported torch with the real libraries already.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from titan_core.toolkit.processes import python
from titan_simulate.engine import stub_libraries
from titan_simulate.engine.forks import RemoteError, begin, load, opened, received

TIMEOUT = 600.0
"""Seconds that a call may take."""


class ForkServer:
    """Calls module-level functions, each in a new process whose CUDA devices are simulated."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        """
        Args:
            preload: modules to import once, before the first call.
        """
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment.setdefault("OMP_NUM_THREADS", "1")
        command = python("-m", "harness.fork_server", str(theirs.fileno()), *preload)
        with theirs:
            self._process = subprocess.Popen(
                command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._pipe = Connection(ours.detach())

    def call(self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT, **kwargs: Any) -> Any:
        """Return the result of ``function``, which must be picklable, as must its arguments.

        Raises:
            Exception: the exception that ``function`` raised, caused by a :class:`RemoteError` with its traceback.
            RemoteError: the process died, or took too long.
        """
        try:
            self._pipe.send_bytes(pickle.dumps((dict(os.environ), os.getcwd(), function, args, kwargs)))
            if not self._pipe.poll(timeout):
                self.close()
                raise RemoteError(f"{function.__name__} took more than {timeout:g} seconds")
            answer = self._pipe.recv_bytes()
        except (EOFError, ConnectionError) as error:
            raise RemoteError(f"the simulating process has ended (exit code {self._process.poll()})") from error
        return opened(answer)

    def close(self) -> None:
        """End the server and the call that it runs, if any."""
        self._pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def serve(pipe: Connection, preload: Sequence[str]) -> None:
    """Answer calls until the other end closes the pipe."""
    load()
    for name in preload:
        importlib.import_module(name)
    gc.freeze()
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(received(*begin(partial(_requested, request))))


def _requested(request: bytes) -> Any:
    environment, folder, function, args, kwargs = pickle.loads(request)
    os.environ.clear()
    os.environ.update(environment)
    stub_libraries.configure_allocator()
    os.chdir(folder)
    return function(*args, **kwargs)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2:])
