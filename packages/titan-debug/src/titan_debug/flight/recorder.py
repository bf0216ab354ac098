"""Dumps of a rank's collectives and threads: when a step takes too long, when the run fails, and on request."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator
from pathlib import Path
from shlex import quote

from titan_core.api import Finding, JobContext, Run, RunEnd, StepReport, hookimpl
from titan_core.toolkit.errors import caused_by_peer
from titan_core.toolkit.secrets import redact_text
from titan_core.toolkit.sections import CommSection, JobSection
from titan_debug.config import LEAST_WATCHED_SECONDS, CommTraceSection
from titan_debug.flight.analysis import MOST_ANALYSED, analyse
from titan_debug.flight.capacity import capacity
from titan_debug.flight.collect import collect, with_failure
from titan_debug.flight.dump import Dump, write_dump
from titan_debug.flight.progress import has_progressed
from titan_debug.flight.read import read_dumps
from titan_debug.flight.recorded import prepare_environment
from titan_debug.flight.stacks_file import StacksFile
from titan_debug.flight.watchdog import Watchdog
from titan_debug.request import Request, Requests

log = logging.getLogger(__name__)

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
        self._dump: Dump | None = None  # the latest one
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
        self._stacks = StacksFile(self._folder, run.world, self._attempt)
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

    @hookimpl
    def titan_exception(self, error: BaseException) -> None:
        """Dump, and request dumps from the other ranks. Skipped for a single rank, which waits for no other, and for an
        interrupt, which needs no explanation."""
        run = self._run
        if run is None or run.world.size == 1 or isinstance(error, KeyboardInterrupt):
            return
        why = redact_text(f"{type(error).__name__}: {error}".partition("\n")[0])
        self._write(why, on_request=False, error=error)
        self._request_others(why)

    @hookimpl(tryfirst=True)
    def titan_train_end(self, end: RunEnd) -> None:
        """Stop the watchdog."""
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None
        if self._stacks is not None:
            self._stacks.close()
            self._stacks = None

    def _on_late_step(self, step: int, seconds: float) -> None:
        """Handle a step that takes longer than ``seconds``. Called in the watchdog's thread."""
        why = f"step {step} takes longer than {seconds:g} s"
        if self._write(why, on_request=False):
            self._request_others(why)
            self._report(why)

    def _on_request(self, request: Request) -> None:
        """Handle a request for a dump. Called in the watchdog's thread."""
        by_person = request.rank is None
        why = request.why if by_person else f"rank {request.rank}: {request.why}"
        if self._write(why, on_request=by_person) and not by_person:
            self._report(why)

    def _write(self, why: str, on_request: bool, error: BaseException | None = None) -> bool:
        """Write a dump, and return whether it was written.

        After a dump of a step with a problem, further dumps of that step are skipped unless the step has progressed: the
        consequences would hide the cause. If the step fails, the failure is added to the existing dump.
        """
        run = self._run
        assert run is not None
        with self._writing:
            known = self._dump if self._troubled_step == self._step and not on_request else None
            try:
                if self._stacks is not None and (known is None or error is not None):
                    self._stacks.write(why)  # first, because the dump needs torch, which may be stuck
                stuck = self._watchdog is not None and self._watchdog.starved
                dump = collect(run.world, why, self._attempt, self._assembled, self._step, self._in_step, stuck)
                over = known is None or has_progressed(known, dump, error is not None and caused_by_peer(error))
                if known is not None and not over:
                    if error is None:
                        return False
                    dump = known
                if error is not None:
                    dump = with_failure(dump, error, self._step, self._in_step, main_is_here=over)
                write_dump(self._folder, dump)
                self._dump = dump
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
        command = f"`titan flight analyse {quote(run.dump_folder)}`"
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
