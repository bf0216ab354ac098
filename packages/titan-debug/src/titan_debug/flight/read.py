"""The dumps of a run, read back: those of its newest attempt, and of one occasion. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from titan_core.api.errors import UserError
from titan_core.api.runs.files import CONFIG, EVENTS
from titan_debug.config import CommTraceSection
from titan_debug.flight.dump import RANK_FILE, STACKS_FILE, Dump
from titan_debug.flight.stacks_text import read_stacks
from titan_runs.run_log import RunLog

OCCASION_SECONDS = 60.0
"""Dumps of an earlier step that are older than the newest one by more are of another occasion."""


@dataclass(frozen=True)
class Dumps:
    """What ranks have written on one occasion."""

    folder: Path
    dumps: list[Dump]
    """By rank, each once."""
    notes: list[str] = field(default_factory=list)
    """What was left out, and why."""

    @property
    def world_size(self) -> int:
        """How many ranks the job has."""
        return max((dump.world_size for dump in self.dumps), default=0)

    @property
    def missing(self) -> list[int]:
        """Ranks that have left nothing."""
        there = {dump.rank for dump in self.dumps}
        return [rank for rank in range(self.world_size) if rank not in there]


def dump_folder(path: str) -> Path:
    """Where the dumps of ``path`` are: a run's directory, or the folder itself.

    Raises:
        UserError: the run's files are damaged.
    """
    folder = Path(path)
    if (folder / CONFIG).exists() or (folder / EVENTS).exists():
        default = CommTraceSection.model_fields["save_traces_folder"].default
        return RunLog.read_folder(folder, "comm.save_traces_folder", default)
    return folder


def read_dumps(folder: Path) -> Dumps:
    """The dumps in ``folder``.

    Raises:
        UserError: there are none.
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
            notes.append(f"{path.name} is left out: it {_damage(error)}")
    for path in sorted(folder.glob(STACKS_FILE.format("*"))):
        try:
            found += read_stacks(path)
        except (OSError, ValueError) as error:
            notes.append(f"{path.name} is left out: {error}")
    if not found:
        why = "there are no dumps here" if folder.is_dir() else "there is no such folder"
        fix = "a rank dumps when a step takes too long or the run fails; `titan flight dump RUN` asks a running job for it"
        raise UserError.one(str(folder), f"{why}{''.join(f'; {note}' for note in notes)}", fix)
    newest = max(dump.attempt for dump in found)
    older = sorted({dump.rank for dump in found if dump.attempt < newest})
    if older:
        notes.append(f"dumps of an earlier attempt are left out (of rank {', '.join(map(str, older))})")
    return Dumps(folder, _of_one_occasion([dump for dump in found if dump.attempt == newest], written, notes), notes)


def _of_one_occasion(found: list[Dump], written: Mapping[int, float], notes: list[str]) -> list[Dump]:
    """One dump for each rank, without those of earlier steps that the rank has not renewed since.

    Args:
        written: of each rank, when its file was written, by the clock of where the files are: those of the machines differ.
    """
    known = [dump for dump in found if dump.step_known]
    last = max((dump.step for dump in known), default=-1)
    newest = max((written[dump.rank] for dump in known if dump.step == last), default=0.0)
    by_rank: dict[int, Dump] = {}
    for dump in known:
        if dump.step < last - 1 or (dump.step < last and written[dump.rank] < newest - OCCASION_SECONDS):
            notes.append(f"rank {dump.rank}'s dump is left out: it is of step {dump.step}, others are of step {last}")
        else:
            by_rank[dump.rank] = dump
    for dump in found:
        if not dump.step_known:
            own = by_rank.get(dump.rank)
            by_rank[dump.rank] = dump if own is None else _together(own, dump)
    return [by_rank[rank] for rank in sorted(by_rank)]


def _together(recorded: Dump, stacks: Dump) -> Dump:
    """What a process has recorded, with how it died; and where it was when Python itself was stuck, if that is why."""
    if not recorded.stuck or stacks.died:
        return replace(recorded, died=stacks.died)
    first = len(recorded.stacks)
    threads = [replace(thread, stack=first + thread.stack) for thread in stacks.threads]
    return replace(recorded, threads=threads, stacks=[*recorded.stacks, *stacks.stacks])


def _damage(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"cannot be read ({error.strerror or error})"
    return "is damaged, or was written by another version"
