"""The dump that a rank writes when something goes wrong: its collectives, threads and failure. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from titan_core.toolkit.atomic_write import atomic_write

RANK_FILE = "rank-{}.json"
STACKS_FILE = "rank-{}.stacks.txt"
BACKGROUND = "background"
"""Label of process groups for background work, such as writing checkpoints. A copy of ``BACKGROUND`` in
``titan_core.api.parallel.world``, which imports torch."""


class Frame(NamedTuple):
    """One call in a stack."""

    file: str
    line: int
    function: str
    code: str = ""
    """The expression being evaluated, such as ``time.sleep(60)``; empty if unknown."""


@dataclass(frozen=True)
class Group:
    """A process group."""

    name: str
    label: str
    """Its purpose: a mesh dimension, or ``all ranks``."""
    ranks: tuple[int, ...]
    """Global ranks of its members, ordered by group rank."""

    @property
    def background(self) -> bool:
        """Whether the group serves background work. A rank that waits in it does not block its main thread."""
        return self.label == BACKGROUND


@dataclass(frozen=True)
class Entry:
    """A collective, send or receive that the rank has started."""

    group: str
    """Name of its process group."""
    backend: str
    """``gloo`` or ``nccl``."""
    op: str
    """The backend's name for it: ``all_reduce``, or ``send 0->1`` with group ranks."""
    seq: int
    """Sequence number among the collectives of its group and backend, starting at 1."""
    p2p: bool
    """Whether it is a send or a receive."""
    done: bool
    state: str
    """``scheduled``, ``started`` or ``completed``; gloo always reports ``scheduled``."""
    created: float
    """When it started, in seconds since the epoch."""
    input_sizes: list[list[int]]
    input_dtypes: list[str]
    output_sizes: list[list[int]]
    output_dtypes: list[str]
    timeout: float | None
    """Seconds."""
    stack: int
    """Where it was called: an index into :attr:`Dump.stacks`."""


@dataclass(frozen=True)
class Thread:
    """A Python thread."""

    name: str
    main: bool
    stack: int
    """An index into :attr:`Dump.stacks`."""


@dataclass(frozen=True)
class Failure:
    """The exception that ended the rank's run."""

    type: str
    message: str
    """Its first line."""
    follows: bool
    """Whether it only reports that another rank is gone or late."""
    time: float
    """Seconds since the epoch."""
    stack: int
    """Where it was raised: an index into :attr:`Dump.stacks`."""


@dataclass(frozen=True)
class Dump:
    """One rank's dump. Stacks begin with the innermost call."""

    rank: int
    world_size: int
    attempt: float
    """When the attempt at the run began, in seconds since the epoch on rank 0's clock; the same on all of its ranks."""
    host: str
    pid: int
    time: float
    """When the dump was written, in seconds since the epoch."""
    why: str
    """The reason for the dump."""
    step: int
    """The last step that the rank started; -1 if unknown."""
    in_step: bool
    """Whether that step was still running."""
    coordinates: dict[str, int]
    """The rank's coordinate along each mesh dimension."""
    groups: list[Group]
    entries: list[Entry]
    """Ordered by start. The recorder keeps only the newest ones."""
    threads: list[Thread]
    stacks: list[list[Frame]]
    failure: Failure | None = None
    died: str = ""
    """faulthandler's name for the signal that ended the process (``Aborted``); empty if none did."""
    stuck: bool = False
    """Whether Python itself was stuck for too long before the dump, so that the stacks were taken too late."""
    recorded: bool = True
    """Whether :attr:`entries` are known. They are not if the process could write only its stacks."""

    @property
    def main_stack(self) -> list[Frame]:
        """The main thread's stack."""
        return next((self.stacks[thread.stack] for thread in self.threads if thread.main), [])

    @property
    def step_known(self) -> bool:
        """Whether :attr:`step` is known. It is not if the process could write only its stacks."""
        return self.step >= 0

    @property
    def lost(self) -> bool:
        """Whether the rank failed because another rank was gone or late."""
        return self.failure is not None and self.failure.follows

    def training(self, entry: Entry) -> bool:
        """Whether ``entry`` belongs to training rather than to background work."""
        return not any(group.background for group in self.groups if group.name == entry.group)


def write_dump(folder: Path, dump: Dump) -> None:
    """Write ``dump`` to ``folder``.

    Raises:
        OSError: the file cannot be written.
    """
    from pydantic import TypeAdapter

    with atomic_write(folder / RANK_FILE.format(dump.rank)) as file:
        file.write_bytes(TypeAdapter(Dump).dump_json(dump))
