"""Everything that a failed or hanging run has left: the failures of its ranks, the verdict over their dumps, and the stacks
of ranks that could write nothing else. Imports no torch."""

from __future__ import annotations

import datetime
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from titan_core.api import UserError
from titan_core.api.config.secrets import redact
from titan_core.toolkit.atomic_write import atomic_write
from titan_core.toolkit.files import open_file, read_bytes, read_text
from titan_core.toolkit.json_lines import complete_lines
from titan_core.toolkit.runs.files import DEBUG, METRICS, PLUGINS
from titan_core.toolkit.runs.run_log import RunLog
from titan_core.toolkit.text import ranks
from titan_debug.flight.diagnose import Analysis, analyse
from titan_debug.flight.dump import dump_folder, read_dumps
from titan_debug.flight.stacks import LeftStacks, left_stacks

MOST_ANALYSED = 256
"""Largest job whose dumps the launcher analyses before it ends."""
LAST_RECORDS = 5
"""Number of metric records on the page."""
MOST_STACKS, LAST_LINES = 4, 60
"""Number of ranks whose stacks are on the page, and of lines of each."""


@dataclass(frozen=True)
class RankCrash:
    """The failure of one rank."""

    rank: int
    world_size: int
    attempt: float
    """When the attempt at the run began, in seconds since the epoch on rank 0's clock; the same on all of its ranks."""
    time: float
    """When the rank failed, in seconds since the epoch."""
    host: str
    pid: int
    step: int
    type: str
    """The exception's class."""
    message: str
    traceback: list[str]
    """The lines of the traceback, including chained exceptions; empty if the message is sufficient."""
    follows: bool
    """Whether the exception only reports that another rank is gone or late."""
    coordinates: dict[str, int]
    """The rank's coordinate along each mesh dimension."""
    environment: dict[str, str]
    command: str


def crash_folder(run: Path) -> Path:
    """Return the folder where the ranks of a run record their failures."""
    return run / DEBUG / "crash"


def write_crash(folder: Path, crash: RankCrash) -> None:
    """Record the failure of a rank.

    Raises:
        OSError: the file cannot be written.
    """
    with atomic_write(folder / f"rank-{crash.rank}.json") as file:
        file.write_text(json.dumps(asdict(crash), indent=1), encoding="utf-8")


@dataclass(frozen=True)
class Report:
    """What the latest attempt at a run has left."""

    path: Path
    """The run's directory, or a folder of dumps."""
    crashes: list[RankCrash]
    """Causes before consequences: first ranks that failed on their own, then ranks that lost another; each the earliest
    first."""
    collectives: Analysis | None
    """``None`` if there are no dumps, or if they only show that others wait for ranks that failed on their own."""
    stacks: list[LeftStacks]
    """Of ranks that left no dump, or that a signal ended."""
    notes: list[str] = field(default_factory=list)
    """Files that were ignored, and why."""

    @classmethod
    def read(cls, path: str) -> Report:
        """Read the run, or the folder of dumps, at ``path``.

        Raises:
            UserError: there is nothing to report, or a file is damaged.
        """
        folder = dump_folder(path)
        dumps = read_dumps(folder)
        notes = list(dumps.notes)
        crashes = list(_read_crashes(crash_folder(Path(path)), notes))
        stacks = left_stacks(folder, notes)
        attempts = [*(crash.attempt for crash in crashes), *(dump.attempt for dump in dumps.dumps)]
        newest = max([*attempts, *(one.attempt for one in stacks)], default=0.0)
        if not newest:
            why = "has no crash files, dumps or stacks" if Path(path).is_dir() else "no such folder"
            fix = "a rank leaves files when it fails or hangs; run `titan flight dump RUN` to dump a running job"
            raise UserError.one(path, f"{why}{''.join(f'; {note}' for note in notes)}", fix)
        old = [f"rank {crash.rank}'s failure" for crash in crashes if crash.attempt < newest]
        old += ["the dumps"] if dumps.dumps and dumps.dumps[0].attempt < newest else []
        notes += [f"ignored {', '.join(old)} of an earlier attempt"] if old else []
        crashes = first_crashes([crash for crash in crashes if crash.attempt == newest])
        current = dumps.dumps if dumps.dumps and dumps.dumps[0].attempt == newest else []
        dumped = {dump.rank for dump in current}
        stacks = [one for one in stacks if one.attempt == newest and (one.died or one.rank not in dumped)]
        found = analyse(dumps) if current else None
        if found is not None and found.kind == "missing":
            failed = {crash.rank for crash in crashes if not crash.follows}
            found = None if failed.issuperset(found.culprits) else found
        return cls(Path(path), crashes, found, stacks, notes)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON-compatible values."""
        return {
            "failures": [asdict(crash) for crash in self.crashes],
            "collectives": None if self.collectives is None else self.collectives.as_dict(),
            "stacks": {str(one.file): one.text for one in self.stacks},
            "notes": self.notes,
        }

    def page(self) -> str:
        """Return the report in Markdown."""
        return "\n\n".join([*self._failures(), *self._hang(), *self._stacks(), *self._context(), *self._notes()])

    def _failures(self) -> Iterator[str]:
        if not self.crashes:
            return
        first, *others = self.crashes
        yield f"# Rank {first.rank} failed in step {first.step}: {first.type}"
        if first.follows:
            yield "This error only reports that another rank is gone or late; no rank has reported the original failure."
        silent = set(range(first.world_size)) - {crash.rank for crash in self.crashes}
        if silent:
            yield (
                f"No report from {ranks(silent)}. Possible reasons: killed (out of memory, by the scheduler, by a signal), "
                "stuck, or report written on another machine."
            )
        yield _facts(first)
        yield "\n".join(_fenced("", "\n".join(first.traceback))) if first.traceback else first.message
        if others:
            alike: dict[tuple[bool, str], list[RankCrash]] = {}
            for crash in others:
                alike.setdefault((crash.follows, crash.type), []).append(crash)
            lines = []
            for (follows, kind), crashes in alike.items():
                because = " (a consequence of another rank's failure)" if follows else ""
                message = crashes[0].message.partition("\n")[0]
                lines.append(f"* {ranks([crash.rank for crash in crashes])}: {kind}: {message}{because}")
            where = f"Their tracebacks are in `{crash_folder(self.path)}`."
            yield "\n".join(["## Other ranks", "", *lines, "", where])

    def _hang(self) -> Iterator[str]:
        found = self.collectives
        if found is None:
            return
        if self.crashes:
            yield "## Collectives and threads"
        yield "\n".join([found.verdict, *(f"  {line}" for line in found.details)])
        rows = [(f"{one.rank}", "?" if one.step is None else f"{one.step}", one.state) for one in found.ranks]
        yield "\n".join(f"{rank:<4}  {step:<4}  {state}" for rank, step, state in [("rank", "step", "state"), *rows])

    def _stacks(self) -> Iterator[str]:
        for one in self.stacks[:MOST_STACKS]:
            text = "\n".join(one.text.splitlines()[-LAST_LINES:])
            yield _block(f"Stacks of rank {one.rank} ({one.file})", "", text)
        if more := self.stacks[MOST_STACKS:]:
            yield f"Further stacks in {more[0].file.parent}: of {ranks([one.rank for one in more])}."

    def _context(self) -> Iterator[str]:
        """Yield what explains a failure to somebody who does not have the run."""
        if not self.crashes:
            return
        import tomli_w

        first = self.crashes[0]
        if (self.path / METRICS).exists():
            with open_file(self.path / METRICS, inside=self.path) as file:
                last = deque((line for _, line in complete_lines(file) if line), LAST_RECORDS)
            yield _block("Last records of metrics.jsonl", "json", b"".join(last).decode(errors="replace").rstrip())
        yield _block("Config", "toml", tomli_w.dumps(redact(RunLog.read_config(self.path))).rstrip())
        if (self.path / PLUGINS).exists():
            yield _block("Plugins", "json", read_text(self.path / PLUGINS, inside=self.path).rstrip())
        yield _block(f"Environment of rank {first.rank}", "", _lines(first.environment))
        yield _block(f"Command line of rank {first.rank}", "", first.command)

    def _notes(self) -> Iterator[str]:
        if self.notes:
            yield "\n".join(f"note: {note}" for note in self.notes)


def verdict_on(run: str, since: float) -> str | None:
    """Return a one-line verdict on the attempt at ``run`` that began at ``since`` (seconds since the epoch), with the
    command that prints the whole report. Return ``None`` if that attempt left no dumps."""
    command = f"see `titan analyse {quote(str(run))}`"
    dumps = read_dumps(dump_folder(run))
    if not dumps.dumps or dumps.dumps[0].attempt < since:
        return None
    return command if dumps.world_size > MOST_ANALYSED else f"{analyse(dumps).verdict}; {command}"


def first_crashes(crashes: Sequence[RankCrash]) -> list[RankCrash]:
    """Sort causes before consequences: first ranks that failed on their own, then ranks that failed because of another;
    each the earliest first."""
    return sorted(crashes, key=lambda crash: (crash.follows, crash.time, crash.rank))


def _read_crashes(folder: Path, notes: list[str]) -> Iterator[RankCrash]:
    from pydantic import TypeAdapter, ValidationError

    adapter = TypeAdapter(RankCrash)
    for file in sorted(folder.glob("rank-*.json")):
        try:
            yield adapter.validate_json(read_bytes(file, inside=file.parent))
        except (OSError, ValidationError) as error:
            notes.append(f"ignored {file.name}, which cannot be read: {str(error).partition(chr(10))[0]}")


def _lines(values: Mapping[str, str]) -> str:
    return "\n".join(f"{name} = {value}" for name, value in values.items())


def _facts(crash: RankCrash) -> str:
    when = datetime.datetime.fromtimestamp(crash.time, datetime.UTC).isoformat(sep=" ", timespec="milliseconds")
    place = ", ".join(f"{dim} {index}" for dim, index in crash.coordinates.items())
    lines = [f"* {when}, process {crash.pid} on {crash.host}", *([f"* mesh coordinates: {place}"] if place else [])]
    return "\n".join(lines)


def _block(title: str, language: str, text: str) -> str:
    return "\n".join([f"## {title}", "", *_fenced(language, text)])


def _fenced(language: str, text: str) -> list[str]:
    fence = "```"
    while fence in text:
        fence += "`"
    return [f"{fence}{language}", text, fence]
