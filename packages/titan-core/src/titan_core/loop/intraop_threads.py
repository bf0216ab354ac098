"""Restricts intra-op parallelism to the thread that trains.

On the CPU, torch divides an operator over a team of OpenMP threads, and each thread that calls operators has its own
team. Once there are more threads in teams than cores, libgomp's threads no longer spin while they wait for work but
sleep, and each operator of a step waits until they have woken up. That costs up to a third of the speed, as long as the
second team lives. The threads of gloo, which copy what the ranks exchange, live as long as their group.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def only_this_thread_has_a_team() -> Iterator[None]:
    """Let operators that any other thread calls, of Python or of C++, run in that thread alone.

    A thread takes over the process's number of threads with its first operator, and keeps it. Threads that have called an
    operator before are therefore as before. So is, of other threads, a matrix product that is the first thing they compute:
    MKL does not ask torch for the number.
    """
    if torch.get_num_threads() == 1 or "parallel backend: OpenMP" not in torch.__config__.parallel_info():
        yield
        return
    _set_for_new_threads(1)
    try:
        yield
    finally:
        _set_for_new_threads(torch.get_num_threads())


def _set_for_new_threads(number: int) -> None:
    """Set the number of threads for threads that have not called an operator yet, and leave that of this thread."""
    # What OpenMP and MKL are told holds for the thread that calls, and what torch remembers for all that come later.
    thread = threading.Thread(target=torch.set_num_threads, args=(number,), name="number of threads")
    thread.start()
    thread.join()
