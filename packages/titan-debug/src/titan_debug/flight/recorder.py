"""Dumps of a rank's collectives and threads: when a step takes too long, when another rank is lost, and on request."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator
from pathlib import Path
from shlex import quote

from titan_core.api import Finding, JobContext, Run, RunEnd, StepReport, hookimpl
from titan_core.api.config.secrets import redact_text
from titan_core.api.config.sections import CommSection, JobSection
from titan_core.toolkit.errors import caused_by_peer
from titan_debug.config import LEAST_WATCHED_SECONDS, CommTraceSection
from titan_debug.flight.collect import capacity, collect, prepare_environment
from titan_debug.flight.diagnose import analyse
from titan_debug.flight.dump import read_dumps, write_dump
from titan_debug.flight.stacks import StacksFile
from titan_debug.flight.watchdog import Watchdog
from titan_debug.request import Request, Requests

log = logging.getLogger(__name__)

MOST_ANALYSED = 256
"""Largest job in which rank 0 analyses all dumps while the job is still running."""
SHARE = 0.8
"""Share of the collectives' timeout after which the watchdog reports a step as slow."""


class FlightRecorder:
    """The Flight Recorder of one rank. It only reports: a hang lasts until its collectives time out, and a step that
    recovers continues."""

    def __init__(self, context: JobContext[CommTraceSection]) -> None:
        comm, section = context.job.section(CommSection), context.section
        self._section = section
        self._trace_buf_size = section.trace_buf_size or capacity(context.job)
        self._folder = Path(context.job.section(JobSection).dump_folder) / section.save_traces_folder
        self._first_limit = max(LEAST_WATCHED_SECONDS, SHARE * comm.init_timeout_seconds)
        self._limit = section.watchdog_seconds or max(LEAST_WATCHED_SECONDS, SHARE * comm.train_timeout_seconds)
        self._run: Run | None = None
        self._assembled = self._attempt = 0.0
        self._step, self._in_step = 0, False
        self._troubled_step: int | None = None  # the latest step that was dumped because something was wrong
        self._reported: set[tuple[str | int, ...]] = set()  # (kind of problem, ranks that caused it)
        self._writing = threading.Lock()
        self._stacks: StacksFile | None = None
        self._requests: Requests | None = None
        self._watchdog: Watchdog | None = None

    @hookimpl
    def titan_job_assembled(self) -> None:
        """Configure torch's recorder. No process group exists yet."""
        self._assembled = time.time()
        prepare_environment(self._trace_buf_size, self._folder)

    @hookimpl(wrapper=True)
    def titan_train_start(self, run: Run) -> Generator[None, object, object]:
        """Start the watchdog before other observers announce the run, so that no request is missed. Files of an older run
        have been moved away by now."""
        self._step = run.step
        self._attempt = run.attempt
        self._stacks = StacksFile(self._folder, run.world.rank, self._attempt)
        self._requests = Requests(self._folder)
        self._watchdog = Watchdog(self._requests, self._first_limit, self._limit, self._on_late_step, self._on_request)
        self._run = run
        self._watchdog.start(self._stacks.file)
        return (yield)

    @hookimpl(tryfirst=True)
    def titan_step_start(self, step: int) -> None:
        """Start watching the step. It runs first so that the other observers' work counts as part of the step."""
        self._step, self._in_step = step, True
        if self._watchdog is not None:
            self._watchdog.step_begins(step)

    @hookimpl(trylast=True)
    def titan_step_end(self, report: StepReport) -> None:
        """Stop watching the step. It runs last, for the same reason."""
        self._in_step = False
        if self._watchdog is not None:
            self._watchdog.step_ends()

    @hookimpl
    def titan_step_cancelled(self, step: int) -> None:
        """Stop watching. A last checkpoint or validation may follow and take any time."""
        self._in_step = False
        if self._watchdog is not None:
            self._watchdog.step_cancelled()

    @hookimpl(tryfirst=True)
    def titan_train_end(self, end: RunEnd) -> None:
        """Stop the watchdog. If the run's error only reports that another rank is gone or late, dump, and request dumps from
        the other ranks; an error of this rank itself needs no dump to explain it."""
        run = self._run
        if end.error is not None and run is not None and run.world.size > 1 and caused_by_peer(end.error):
            why = redact_text(f"{type(end.error).__name__}: {end.error}".partition("\n")[0])
            if self._write(why, lost=True):
                self._request_others(why)
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None
        if self._stacks is not None:
            self._stacks.close()
            self._stacks = None

    def _on_late_step(self, step: int, seconds: float) -> None:
        """Handle a step that takes longer than ``seconds``. Called in the watchdog's thread."""
        why = f"step {step} takes longer than {seconds:g} s"
        if self._write(why):
            self._request_others(why)
            self._report(why)

    def _on_request(self, request: Request) -> None:
        """Handle a request for a dump. Called in the watchdog's thread."""
        by_person = request.rank is None
        why = request.why if by_person else f"rank {request.rank}: {request.why}"
        if self._write(why, on_request=by_person) and not by_person:
            self._report(why)

    def _write(self, why: str, on_request: bool = False, lost: bool = False) -> bool:
        """Write a dump, and return whether it was written. A step with a problem is dumped once: a later dump would show
        the consequences instead of the cause."""
        run = self._run
        assert run is not None
        with self._writing:
            if self._troubled_step == self._step and not on_request:
                return False
            try:
                if self._stacks is not None:
                    self._stacks.write(why)  # first, because the dump needs torch, which may be stuck
                dump = collect(run.world, why, self._attempt, self._assembled, self._step, self._in_step, lost)
                write_dump(self._folder, dump)
            except OSError as problem:
                log.error("%s: cannot write a dump to %s: %s", why, self._folder, problem.strerror or problem)
                return False
            if not on_request:
                self._troubled_step = self._step
            elif run.world.rank == 0:
                log.warning("%s: dumped collectives and threads to %s", why, self._folder)
            return True

    def _request_others(self, why: str) -> None:
        assert self._run is not None and self._requests is not None
        try:
            self._requests.send(why, self._run.world.rank)
        except OSError as problem:
            log.error("cannot request the other ranks' dumps in %s: %s", self._folder, problem.strerror or problem)

    def _report(self, why: str) -> None:
        """On rank 0, log the problem and, once the other ranks have dumped, its cause. Each cause is reported once. Called
        in the watchdog's thread."""
        run = self._run
        if run is None or run.world.rank != 0 or self._watchdog is None:
            return
        command = f"`titan analyse {quote(run.dump_folder)}`"
        dumped = f"{why}: dumped the collectives and threads of every rank to {self._folder}; run {command} to read them"
        first, step = not self._reported, self._step
        if first:
            log.warning("%s", dumped)  # before the analysis, which may fail
        verdict = ""
        if run.world.size <= MOST_ANALYSED:
            self._watchdog.pause()
            found = analyse(read_dumps(self._folder))
            late = found.kind in ("behind", "elsewhere")
            problem = ("late" if late else found.kind, *found.culprits)
            # Later dumps of a slow run often explain nothing, because they were taken while ranks moved.
            if problem in self._reported or (not first and found.kind == "nothing"):
                return  # for example, a loader that is slow in every step
            self._reported.add(problem)
            verdict = found.verdict
        if not first:
            log.warning("%s", dumped)
        if verdict:
            log.warning("%s", verdict)
        run.report(Finding("hang", f"{why}: {verdict}" if verdict else why, step))
