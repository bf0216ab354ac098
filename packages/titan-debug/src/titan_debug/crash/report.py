"""Writes one page about a failed run: the exception of each rank, the original failure first, and the context needed to
investigate it."""

from __future__ import annotations

import logging
import os
import socket
import time
import traceback
from pathlib import Path
from threading import Thread

from titan_core.api import JobContext, Run, RunStopped, UserError, hookimpl
from titan_core.toolkit.atomic_write import atomic_write
from titan_core.toolkit.errors import PluginFailure, caused_by_peer
from titan_core.toolkit.runs.files import DEBUG, METRICS
from titan_core.toolkit.secrets import redact, redact_text
from titan_debug.config import CommTraceSection
from titan_debug.crash.environment import command_line, describe_environment
from titan_debug.crash.page import Context, RankCrash, first_crashes, page
from titan_debug.crash.rank_files import QUIET, CrashFiles
from titan_debug.flight.analysis import MOST_ANALYSED, analyse
from titan_debug.flight.read import read_dumps

log = logging.getLogger(__name__)

FOLDER = "crash"
PAGE = "report.md"
LONGEST = 10.0
"""Longest time for which the page is updated, in seconds."""
LAST_RECORDS = 5
"""Number of metric records on the page."""
_MOST_READ = 256 * 1024


class CrashReport:
    """The crash reporter of one rank. A run that fails before training needs no report: its error explains the problem."""

    def __init__(self, context: JobContext[None]) -> None:
        self._run: Run | None = None
        self._folder = Path()
        self._step = 0

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Enable the report."""
        self._step = run.step
        self._folder = Path(run.dump_folder).absolute()
        self._run = run

    @hookimpl(tryfirst=True)
    def titan_step_start(self, step: int) -> None:
        """Record the current step."""
        self._step = step

    @hookimpl
    def titan_exception(self, error: BaseException) -> None:
        """Write this rank's file. If this rank is the one that writes the page, write it and update it in the background
        while other ranks fail: they may be waiting for this process to end."""
        run = self._run
        if run is None or isinstance(error, KeyboardInterrupt):
            return
        try:
            self._report(run, error)
        except OSError as problem:  # a full disk must not hide the error itself behind a traceback
            log.error("cannot write the crash report: %s", problem)

    def _report(self, run: Run, error: BaseException) -> None:
        folder = self._folder / DEBUG / FOLDER
        own = self._crash(run, error)
        files = CrashFiles(folder, run.attempt, run.world.size)
        files.add(own)
        if not files.writes_the_page(own):
            return
        files.poll()
        self._write(run, files, verdict="")  # immediately: the launcher may soon end this process
        verdict = self._verdict(run)
        if verdict:
            self._write(run, files, verdict)
        first = first_crashes(files.crashes)[0]
        if first.follows == own.follows:  # otherwise a rank that failed on its own has already logged it
            shown = Path(run.dump_folder) / DEBUG / FOLDER / PAGE
            log.error("rank %d failed in step %d; the crash report is %s", first.rank, first.step, shown)
        if not files.complete:
            Thread(target=self._follow, args=(run, files, verdict), name="crash report").start()

    def _write(self, run: Run, files: CrashFiles, verdict: str) -> None:
        """Write the page, and rewrite it if other ranks have reported meanwhile: the last version must include all ranks."""
        context = self._context(run, verdict)
        while True:
            with atomic_write(self._folder / DEBUG / FOLDER / PAGE) as file:
                file.write_text(page(files.crashes, context, files.unread), encoding="utf-8")
            if not files.poll():
                return

    def _follow(self, run: Run, files: CrashFiles, verdict: str) -> None:
        """Rewrite the page as other ranks report, until none has for ``QUIET`` seconds. Runs in its own thread."""
        began = quiet = time.monotonic()
        end = began + LONGEST
        try:
            while not files.complete and time.monotonic() < min(quiet + QUIET, end):
                time.sleep(QUIET / 10)
                if files.poll():
                    self._write(run, files, verdict)
                    quiet = time.monotonic()
            if quiet > began:  # the other ranks have written dumps too
                self._write(run, files, self._verdict(run))
        except OSError as error:
            log.warning("cannot update the crash report: %s", error)

    def _crash(self, run: Run, error: BaseException) -> RankCrash:
        explained = isinstance(error, UserError | RunStopped) and not isinstance(error, PluginFailure)
        return RankCrash(
            rank=run.world.rank,
            world_size=run.world.size,
            attempt=run.attempt,
            time=time.time(),
            host=socket.gethostname(),
            pid=os.getpid(),
            step=self._step,
            type=type(error).__name__,
            message=redact_text(str(error)),
            traceback=[] if explained else _lines_of(error),
            follows=caused_by_peer(error),
            coordinates={dim: run.world.coordinate(dim) for dim in run.world.mesh.names},
            environment=describe_environment(run.world.device),
            command=command_line(),
        )

    def _context(self, run: Run, verdict: str) -> Context:
        import tomli_w  # rarely needed

        return Context(
            config=tomli_w.dumps(redact(run.job.config.as_dict())),
            plugins=run.job.plugin_versions(),
            metrics=last_lines(self._folder / METRICS),
            verdict=verdict,
            run=run.dump_folder,
        )

    def _verdict(self, run: Run) -> str:
        """Return the verdict over the dumps that this attempt has written so far."""
        if run.world.size > MOST_ANALYSED:
            return ""
        try:
            dumps = read_dumps(self._folder / run.job.config.section(CommTraceSection).save_traces_folder)
        except UserError:  # no dumps
            return ""
        return analyse(dumps).verdict if dumps.dumps[0].attempt == run.attempt else ""


def _lines_of(error: BaseException) -> list[str]:
    return [redact_text(line.rstrip("\n")) for line in traceback.format_exception(error)]


def last_lines(file: Path) -> list[str]:
    """Return the last complete lines of a file of records."""
    if not file.exists():
        return []
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - _MOST_READ))
        lines = opened.read().decode(errors="replace").split("\n")
    return lines[:-1][-LAST_RECORDS:]  # the text after the last newline is empty or incomplete
