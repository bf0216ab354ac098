"""Collects the content of a rank's dump."""

from __future__ import annotations

import logging
import os
import socket
import time
from dataclasses import replace

from titan_core.api import World
from titan_core.toolkit.errors import caused_by_peer, chain
from titan_core.toolkit.secrets import redact_text
from titan_debug.flight.dump import Dump, Entry, Failure, Frame, Group, Thread
from titan_debug.flight.recorded import process_groups, recorded_entries
from titan_debug.flight.stacks import stack_of_traceback, thread_stacks

log = logging.getLogger(__name__)


def collect(world: World, why: str, attempt: float, since: float, step: int, in_step: bool, stuck: bool) -> Dump:
    """Return what this rank is doing now. If torch's records cannot be read, the dump contains the stacks alone.

    Args:
        why: reason for the dump.
        attempt: start of the attempt, in seconds since the epoch on rank 0's clock.
        since: seconds since the epoch. Earlier collectives belong to a previous job of this process and are omitted.
        step: the last step that the rank started.
        in_step: whether that step is still running.
        stuck: whether Python itself was stuck for too long before this call.
    """
    stacks: dict[tuple[Frame, ...], int] = {}
    groups: list[Group] = []
    entries: list[Entry] = []
    recorded = True
    try:
        groups, entries = process_groups(world), recorded_entries(stacks, since)
    except Exception:  # another torch version may change this private API, and the stacks are useful on their own
        log.exception("cannot read torch's record of collectives; the dump contains stacks only")
        recorded = False
    threads = [Thread(name, main, stacks.setdefault(tuple(stack), len(stacks))) for name, main, stack in thread_stacks()]
    return Dump(
        rank=world.rank,
        world_size=world.size,
        attempt=attempt,
        host=socket.gethostname(),
        pid=os.getpid(),
        time=time.time(),
        why=why,
        step=step,
        in_step=in_step,
        coordinates={dim: world.coordinate(dim) for dim in world.mesh.names},
        groups=groups,
        entries=entries,
        threads=threads,
        stacks=[list(stack) for stack in stacks],
        stuck=stuck,
        recorded=recorded,
    )


def with_failure(dump: Dump, error: BaseException, step: int, in_step: bool, main_is_here: bool) -> Dump:
    """Return ``dump`` with the exception that ended the run.

    Args:
        main_is_here: whether the main thread's stack was taken while it handled ``error``. That stack is of no interest, so
            the stack of the ``raise`` replaces it.
    """
    raised = stack_of_traceback(chain(error)[-1].__traceback__)
    index = len(dump.stacks)
    threads = [replace(thread, stack=index) if thread.main and main_is_here else thread for thread in dump.threads]
    message = redact_text(str(error).partition("\n")[0])
    failure = Failure(type(error).__name__, message, caused_by_peer(error), time.time(), index)
    stacks = [*dump.stacks, raised]
    return replace(dump, step=step, in_step=in_step, threads=threads, stacks=stacks, failure=failure)
