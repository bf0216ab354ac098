"""What a rank writes when something goes wrong: its collectives, its threads, and what ended it. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from titan_debug.whole_file import whole_file

RANK_FILE = "rank-{}.json"
STACKS_FILE = "rank-{}.stacks.txt"
BACKGROUND = "background"
"""Label of the groups for work beside training, such as writing checkpoints: ``titan_core.train.world``'s, free of torch."""


class Frame(NamedTuple):
    """One call of a stack."""

    file: str
    line: int
    function: str
    code: str = ""
    """The expression that is being computed there, such as ``time.sleep(60)``; empty where it is not known."""


@dataclass(frozen=True)
class Group:
    """A process group."""

    name: str
    label: str
    """What it is for: a dimension of the mesh, or ``all ranks``."""
    ranks: tuple[int, ...]
    """Its members by their rank among all, in the order of their rank within it."""

    @property
    def background(self) -> bool:
        """Whether it is for work beside training: one that waits in it does not hold up its main thread."""
        return self.label == BACKGROUND


@dataclass(frozen=True)
class Entry:
    """A collective, or a send or receive, that the rank has begun."""

    group: str
    """Name of its process group."""
    backend: str
    """``gloo``, ``nccl``."""
    op: str
    """As the backend calls it: ``all_reduce``; ``send 0->1`` with ranks within the group."""
    seq: int
    """Its number among the collectives of its group and backend, from 1 on."""
    p2p: bool
    """Whether it is a send or a receive."""
    done: bool
    state: str
    """``scheduled``, ``started`` or ``completed``; gloo knows the first alone."""
    created: float
    """When it was begun, in seconds since the epoch."""
    input_sizes: list[list[int]]
    input_dtypes: list[str]
    output_sizes: list[list[int]]
    output_dtypes: list[str]
    timeout: float | None
    """Seconds."""
    stack: int
    """Where it was called: an index of :attr:`Dump.stacks`."""


@dataclass(frozen=True)
class Thread:
    """A Python thread."""

    name: str
    main: bool
    stack: int
    """An index of :attr:`Dump.stacks`."""


@dataclass(frozen=True)
class Failure:
    """The exception that ended the rank's run."""

    type: str
    message: str
    """Its first line."""
    follows: bool
    """Whether it only says that another rank is gone or late."""
    time: float
    stack: int
    """Where it was raised: an index of :attr:`Dump.stacks`."""


@dataclass(frozen=True)
class Dump:
    """What one rank has written. Stacks begin with the innermost call."""

    rank: int
    world_size: int
    attempt: float
    """When the attempt at the run began, on rank 0's clock; the same on all of its ranks."""
    host: str
    pid: int
    time: float
    """When it was written, in seconds since the epoch."""
    why: str
    step: int
    """The last step that the rank has begun; -1 if that is not known."""
    in_step: bool
    """Whether it was still in it."""
    coordinates: dict[str, int]
    """Its place in the mesh."""
    groups: list[Group]
    entries: list[Entry]
    """In the order in which they were begun. Older ones than the recorder keeps are gone."""
    threads: list[Thread]
    stacks: list[list[Frame]]
    failure: Failure | None = None
    died: str = ""
    """By what signal the process ended, as Python's faulthandler calls it (``Aborted``); empty where it did not."""
    stuck: bool = False
    """Whether it could be written only after Python itself had been stuck for too long, so that the stacks come too late."""
    recorded: bool = True
    """Whether :attr:`entries` are known; of a process that could only write its stacks they are not."""

    @property
    def main_stack(self) -> list[Frame]:
        """Where the main thread is."""
        return next((self.stacks[thread.stack] for thread in self.threads if thread.main), [])

    @property
    def step_known(self) -> bool:
        """Whether :attr:`step` is known; of a process that could only write its stacks it is not."""
        return self.step >= 0

    @property
    def lost(self) -> bool:
        """Whether the rank failed because another was gone or late."""
        return self.failure is not None and self.failure.follows

    def training(self, entry: Entry) -> bool:
        """Whether ``entry`` is of training, and not of work beside it."""
        return not any(group.background for group in self.groups if group.name == entry.group)


def write_dump(folder: Path, dump: Dump) -> None:
    """Write ``dump`` into ``folder``.

    Raises:
        OSError: it cannot be written.
    """
    from pydantic import TypeAdapter

    with whole_file(folder / RANK_FILE.format(dump.rank)) as file:
        file.write_bytes(TypeAdapter(Dump).dump_json(dump))
