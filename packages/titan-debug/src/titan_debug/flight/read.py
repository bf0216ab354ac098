"""Reads the dumps of a run: those of its newest attempt that belong to one incident. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from titan_core.api import UserError
from titan_core.toolkit.runs.files import CONFIG, EVENTS
from titan_core.toolkit.runs.run_log import RunLog
from titan_core.toolkit.text import ranks
from titan_debug.config import CommTraceSection
from titan_debug.flight.dump import RANK_FILE, STACKS_FILE, Dump
from titan_debug.flight.stacks_text import read_stacks

INCIDENT_SECONDS = 60.0
"""A dump of an earlier step belongs to another incident if it is older than the newest dump by more than this."""


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
    """Read the dumps in ``folder``.

    Raises:
        UserError: ``folder`` contains no usable dump.
    """
    from pydantic import TypeAdapter, ValidationError

    adapter = TypeAdapter(Dump)
    notes: list[str] = []
    found: list[Dump] = []
    written: dict[int, float] = {}
    for path in sorted(folder.glob(RANK_FILE.format("*"))):
        try:
            found.append(adapter.validate_json(path.read_bytes()))
            written[found[-1].rank] = path.stat().st_mtime
        except (OSError, ValidationError) as error:
            notes.append(f"ignored {path.name}: it {_damage(error)}")
    for path in sorted(folder.glob(STACKS_FILE.format("*"))):
        try:
            found += read_stacks(path)
        except (OSError, ValueError) as error:
            notes.append(f"ignored {path.name}: {error}")
    if not found:
        why = "contains no dumps" if folder.is_dir() else "no such folder"
        fix = "ranks dump when a step takes too long or the run fails; run `titan flight dump RUN` to dump a running job"
        raise UserError.one(str(folder), f"{why}{''.join(f'; {note}' for note in notes)}", fix)
    newest = max(dump.attempt for dump in found)
    older = sorted({dump.rank for dump in found if dump.attempt < newest})
    if older:
        notes.append(f"ignored dumps of an earlier attempt ({ranks(older)})")
    return Dumps(folder, _of_one_incident([dump for dump in found if dump.attempt == newest], written, notes), notes)


def _of_one_incident(found: list[Dump], written: Mapping[int, float], notes: list[str]) -> list[Dump]:
    """Return one dump for each rank, without outdated dumps of earlier steps.

    Args:
        written: when each rank's file was written, by the file system's clock, because the machines' clocks differ.
    """
    known = [dump for dump in found if dump.step_known]
    last = max((dump.step for dump in known), default=-1)
    newest = max((written[dump.rank] for dump in known if dump.step == last), default=0.0)
    by_rank: dict[int, Dump] = {}
    for dump in known:
        if dump.step < last - 1 or (dump.step < last and written[dump.rank] < newest - INCIDENT_SECONDS):
            notes.append(f"ignored rank {dump.rank}'s dump of step {dump.step}: other dumps are from step {last}")
        else:
            by_rank[dump.rank] = dump
    for dump in found:
        if not dump.step_known:
            own = by_rank.get(dump.rank)
            by_rank[dump.rank] = dump if own is None else _merged(own, dump)
    return [by_rank[rank] for rank in sorted(by_rank)]


def _merged(recorded: Dump, stacks: Dump) -> Dump:
    """Add to a process's dump how it died or, if Python itself was stuck, the stacks from that time."""
    if not recorded.stuck or stacks.died:
        return replace(recorded, died=stacks.died)
    first = len(recorded.stacks)
    threads = [replace(thread, stack=first + thread.stack) for thread in stacks.threads]
    return replace(recorded, threads=threads, stacks=[*recorded.stacks, *stacks.stacks])


def _damage(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"cannot be read ({error.strerror or error})"
    return "is damaged or was written by another version"
