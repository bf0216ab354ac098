"""One page about a failed run: what each rank raised, the first one on top, and what is needed to look into it."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from titan_core.config.render import to_toml
from titan_core.errors import RunStopped, UserError
from titan_core.hookspecs import hookimpl
from titan_core.job.job import JobFacts
from titan_core.train.events import RunStart
from titan_core.train.run_directory import DEBUG, METRICS
from titan_debug.attempt import begin_attempt
from titan_debug.config import CommTraceSection
from titan_debug.consequences import follows_from_a_peer
from titan_debug.crash_page import Context, RankCrash, first_crashes, page
from titan_debug.environment import command_line, describe_environment, without_secrets
from titan_debug.flight.analysis import MOST_ANALYSED, analyse
from titan_debug.flight.read import read_dumps
from titan_debug.whole_file import whole_file

log = logging.getLogger(__name__)

FOLDER = "crash"
PAGE = "report.md"
LAST_RECORDS = 5
"""Records of metrics that the page shows."""
_MOST_READ = 256 * 1024


class CrashReport:
    """One rank's. A run that has not begun to train needs none: its error says what was wrong with the job."""

    def __init__(self) -> None:
        self._run: RunStart | None = None
        self._attempt = 0.0
        self._step = 0

    @hookimpl
    def titan_train_start(self, run: RunStart) -> None:
        """From now on an error is worth a report."""
        self._step = run.step
        self._attempt = begin_attempt(run)
        self._run = run

    @hookimpl(tryfirst=True)
    def titan_step_start(self, step: int) -> None:
        """Remember where the run is."""
        self._step = step

    @hookimpl
    def titan_exception(self, error: BaseException) -> None:
        """Write what this rank has to say, and the page from what all have said so far."""
        run = self._run
        if run is None or isinstance(error, KeyboardInterrupt):
            return
        folder = Path(run.dump_folder) / DEBUG / FOLDER
        own = self._crash(run, error)
        with whole_file(folder / f"rank-{own.rank}.json") as file:
            file.write_text(json.dumps(asdict(own), indent=1), encoding="utf-8")
        crashes = read_crashes(folder, self._attempt)
        with whole_file(folder / PAGE) as file:
            file.write_text(page(crashes, self._context(run)), encoding="utf-8")
        if first_crashes(crashes)[0].rank == own.rank:  # each rank writes the page, one says so
            log.error("rank %d failed in step %d; the crash report is %s", own.rank, own.step, folder / PAGE)

    def _crash(self, run: RunStart, error: BaseException) -> RankCrash:
        told = isinstance(error, UserError | RunStopped)
        return RankCrash(
            rank=run.world.rank,
            world_size=run.world.size,
            attempt=self._attempt,
            time=time.time(),
            host=socket.gethostname(),
            pid=os.getpid(),
            step=self._step,
            type=type(error).__name__,
            message=str(error),
            # Who raises these has said all in the message.
            traceback=[] if told else [line.rstrip("\n") for line in traceback.format_exception(error)],
            follows=follows_from_a_peer(error),
            coordinates={dim: run.world.coordinate(dim) for dim in run.world.mesh.mesh_dim_names or ()},
            environment=describe_environment(run.world.device),
            command=command_line(),
        )

    def _context(self, run: RunStart) -> Context:
        return Context(
            config=without_secrets(to_toml(run.job.config)),
            plugins=run.job.plugin_versions(),
            metrics=last_lines(Path(run.dump_folder) / METRICS),
            verdict=self._verdict(run),
            run=run.dump_folder,
        )

    def _verdict(self, run: RunStart) -> str:
        """Of the dumps that this attempt has left so far."""
        if run.world.size > MOST_ANALYSED:
            return ""
        try:
            dumps = read_dumps(Path(run.dump_folder) / run.job.config.section(CommTraceSection).save_traces_folder)
        except UserError:  # there are none
            return ""
        return analyse(dumps).verdict if dumps.dumps[0].attempt == self._attempt else ""


def read_crashes(folder: Path, attempt: float) -> list[RankCrash]:
    """What ranks have written in this attempt; what an earlier one has left is not of it, and what cannot be read is not
    there."""
    crashes = []
    for file in sorted(folder.glob("rank-*.json")):
        try:
            crash = RankCrash(**json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            log.warning("%s is left out of the crash report: %s", file, error)
            continue
        if crash.attempt == attempt:
            crashes.append(crash)
    return crashes


def last_lines(file: Path) -> list[str]:
    """The last whole lines of a file of records."""
    if not file.exists():
        return []
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - _MOST_READ))
        lines = opened.read().decode(errors="replace").split("\n")
    return lines[:-1][-LAST_RECORDS:]  # what follows the last newline is empty, or torn


def build(facts: JobFacts) -> CrashReport:
    """For the plugin."""
    return CrashReport()
