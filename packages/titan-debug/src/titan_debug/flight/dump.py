"""The dump that a rank writes when a step hangs, its collectives and threads, and how the dumps of a run are read back.
Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from titan_core.toolkit.atomic_write import atomic_write
from titan_core.toolkit.files import LONGEST_TABLE, read_bytes
from titan_core.toolkit.runs.files import CONFIG, EVENTS
from titan_core.toolkit.runs.run_log import RunLog
from titan_core.toolkit.text import ranks
from titan_debug.config import CommTraceSection

RANK_FILE = "rank-{}.json"
BACKGROUND = "background"
"""Label of process groups for background work, such as writing checkpoints. A copy of ``BACKGROUND`` in
``titan_core.api.parallel.world``, which imports torch."""

INCIDENT_SECONDS = 60.0
"""A dump of an earlier step belongs to another incident if it is older than the newest dump by more than this."""


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
    """The last step that the rank started."""
    in_step: bool
    """Whether that step was still running."""
    coordinates: dict[str, int]
    """The rank's coordinate along each mesh dimension."""
    groups: list[Group]
    entries: list[Entry]
    """Ordered by start. The recorder keeps only the newest ones."""
    threads: list[Thread]
    stacks: list[list[Frame]]
    lost: bool = False
    """Whether the rank dumped because an exception reported that another rank was gone or late."""
    recorded: bool = True
    """Whether :attr:`entries` are known: another version of torch may not let us read them."""

    @property
    def main_stack(self) -> list[Frame]:
        """The main thread's stack."""
        return next((self.stacks[thread.stack] for thread in self.threads if thread.main), [])

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


@dataclass(frozen=True)
class Dumps:
    """The ranks' dumps of one incident."""

    folder: Path
    dumps: list[Dump]
    """At most one for each rank, ordered by rank."""
    notes: list[str] = field(default_factory=list)
    """Files that were ignored, and why."""

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return max((dump.world_size for dump in self.dumps), default=0)

    @property
    def missing(self) -> list[int]:
        """Ranks without a dump."""
        present = {dump.rank for dump in self.dumps}
        return [rank for rank in range(self.world_size) if rank not in present]


def dump_folder(path: str) -> Path:
    """Return the folder of dumps for ``path``, which is a run's directory or that folder itself.

    Raises:
        UserError: the run's files are damaged.
    """
    folder = Path(path)
    if (folder / CONFIG).exists() or (folder / EVENTS).exists():
        default = CommTraceSection.model_fields["save_traces_folder"].default
        return RunLog.read_folder(folder, "comm.save_traces_folder", default)
    return folder


def read_dumps(folder: Path) -> Dumps:
    """Read the dumps in ``folder``, of which there may be none."""
    from pydantic import TypeAdapter, ValidationError

    adapter = TypeAdapter(Dump)
    notes: list[str] = []
    found: list[Dump] = []
    written: dict[int, float] = {}
    for path in sorted(folder.glob(RANK_FILE.format("*"))):
        try:
            found.append(adapter.validate_json(read_bytes(path, longest=LONGEST_TABLE, inside=path.parent)))
            written[found[-1].rank] = path.stat().st_mtime
        except (OSError, ValidationError) as error:
            notes.append(f"ignored {path.name}: it {_damage(error)}")
    if not found:
        return Dumps(folder, [], notes)
    newest = max(dump.attempt for dump in found)
    older = sorted({dump.rank for dump in found if dump.attempt < newest})
    if older:
        notes.append(f"ignored dumps of an earlier attempt ({ranks(older)})")
    return Dumps(folder, _of_one_incident([dump for dump in found if dump.attempt == newest], written, notes), notes)


def _of_one_incident(found: list[Dump], written: Mapping[int, float], notes: list[str]) -> list[Dump]:
    """Return the dumps ordered by rank, without outdated dumps of earlier steps.

    Args:
        written: when each rank's file was written, by the file system's clock, because the machines' clocks differ.
    """
    last = max(dump.step for dump in found)
    newest = max(written[dump.rank] for dump in found if dump.step == last)
    kept: list[Dump] = []
    for dump in found:
        if dump.step < last - 1 or (dump.step < last and written[dump.rank] < newest - INCIDENT_SECONDS):
            notes.append(f"ignored rank {dump.rank}'s dump of step {dump.step}: other dumps are from step {last}")
        else:
            kept.append(dump)
    return sorted(kept, key=lambda dump: dump.rank)


def _damage(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"cannot be read ({error.strerror or error})"
    return "is damaged or was written by another version"
