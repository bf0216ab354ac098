"""Dumps of a rank's collectives and threads: when a step takes too long, when the run fails, and on request."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator
from pathlib import Path

from titan_core.api.build_context import JobContext
from titan_core.api.events import Finding, RunStart, StepReport, TrainEnd
from titan_core.api.hookspecs import hookimpl
from titan_core.api.sections import CommSection, JobSection
from titan_core.api.tools.consequences import follows_from_a_peer
from titan_core.api.tools.secrets import text_without_secrets
from titan_debug.config import LEAST_WATCHED_SECONDS, CommTraceSection
from titan_debug.flight.analysis import MOST_ANALYSED, analyse
from titan_debug.flight.collect import collect, with_failure
from titan_debug.flight.dump import Dump, write_dump
from titan_debug.flight.progress import has_gone_on
from titan_debug.flight.read import read_dumps
from titan_debug.flight.recorded import prepare_environment
from titan_debug.flight.stacks_file import StacksFile
from titan_debug.flight.watchdog import Watchdog
from titan_debug.request import Request, Requests

log = logging.getLogger(__name__)

SHARE = 0.8
"""Of the time after which collectives fail: how long a step may take before the watchdog says so."""


class FlightRecorder:
    """One rank's. It only reports: what hangs keeps hanging until its collectives time out, and what recovers continues."""

    def __init__(self, context: JobContext[CommTraceSection]) -> None:
        comm, section = context.facts.section(CommSection), context.section
        self._section = section
        self._folder = Path(context.facts.section(JobSection).dump_folder) / section.save_traces_folder
        self._first_limit = max(LEAST_WATCHED_SECONDS, SHARE * comm.init_timeout_seconds)
        self._limit = section.watchdog_seconds or max(LEAST_WATCHED_SECONDS, SHARE * comm.train_timeout_seconds)
        self._run: RunStart | None = None
        self._assembled = self._attempt = 0.0
        self._step, self._in_step = 0, False
        self._dump: Dump | None = None  # the last one
        self._troubled_step: int | None = None  # the last step that was dumped because something was wrong
        self._told: set[tuple[str | int, ...]] = set()  # kinds of trouble, and the ranks that they came from
        self._writing = threading.Lock()
        self._stacks: StacksFile | None = None
        self._requests: Requests | None = None
        self._watchdog: Watchdog | None = None

    @hookimpl
    def titan_job_assembled(self) -> None:
        """No process group exists yet."""
        self._assembled = time.time()
        prepare_environment(self._section.trace_buf_size, self._folder)

    @hookimpl(wrapper=True)
    def titan_train_start(self, run: RunStart) -> Generator[None, object, object]:
        """Begin to watch, before anybody can read of the run, and ask. An older run's files have been moved away by now."""
        self._step = run.step
        self._attempt = run.attempt
        self._stacks = StacksFile(self._folder, run.world, self._attempt)
        self._requests = Requests(self._folder)
        self._watchdog = Watchdog(self._requests, self._first_limit, self._limit, self._late, self._asked)
        self._run = run
        self._watchdog.start(self._stacks.file)
        return (yield)

    @hookimpl(tryfirst=True)
    def titan_step_start(self, step: int) -> None:
        """What other observers do then is part of the step."""
        self._step, self._in_step = step, True
        if self._watchdog is not None:
            self._watchdog.step_begins(step)

    @hookimpl(trylast=True)
    def titan_step_end(self, report: StepReport) -> None:
        """Likewise."""
        self._in_step = False
        if self._watchdog is not None:
            self._watchdog.step_ends()

    @hookimpl
    def titan_step_cancelled(self, step: int) -> None:
        """What follows, a last checkpoint or validation, may take as long as it does."""
        self._in_step = False
        if self._watchdog is not None:
            self._watchdog.step_cancelled()

    @hookimpl
    def titan_exception(self, error: BaseException) -> None:
        """Dump, and ask the other ranks to. A run of one rank has nobody to wait for, and an interrupt explains itself."""
        run = self._run
        if run is None or run.world.size == 1 or isinstance(error, KeyboardInterrupt):
            return
        why = text_without_secrets(f"{type(error).__name__}: {error}".partition("\n")[0])
        self._write(why, asked=False, error=error)
        self._ask_others(why)

    @hookimpl(tryfirst=True)
    def titan_train_end(self, end: TrainEnd) -> None:
        """Nothing is watched any more."""
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None
        if self._stacks is not None:
            self._stacks.close()
            self._stacks = None

    def _late(self, step: int, seconds: float) -> None:
        """The watchdog: ``step`` takes longer than ``seconds``."""
        why = f"step {step} takes longer than {seconds:g} s"
        if self._write(why, asked=False):
            self._ask_others(why)
            self._tell(why)

    def _asked(self, request: Request) -> None:
        """The watchdog: somebody wants a dump."""
        person = request.rank is None
        if self._write(request.why if person else f"rank {request.rank}: {request.why}", asked=person) and not person:
            self._tell(f"rank {request.rank}: {request.why}")

    def _write(self, why: str, asked: bool, error: BaseException | None = None) -> bool:
        """Write a dump; whether that was done. A step that was dumped because something is wrong is dumped no more, unless
        it has gone on since: what came of it would hide what it came from. Its failure is added to what is there."""
        run = self._run
        assert run is not None
        with self._writing:
            known = self._dump if self._troubled_step == self._step and not asked else None
            try:
                if self._stacks is not None and (known is None or error is not None):
                    self._stacks.write(why)  # the other file takes torch's help, which may be what is stuck
                stuck = self._watchdog is not None and self._watchdog.starved
                dump = collect(run.world, why, self._attempt, self._assembled, self._step, self._in_step, stuck)
                over = known is None or has_gone_on(known, dump, error is not None and follows_from_a_peer(error))
                if known is not None and not over:
                    if error is None:
                        return False
                    dump = known
                if error is not None:
                    dump = with_failure(dump, error, self._step, self._in_step, main_is_here=over)
                write_dump(self._folder, dump)
                self._dump = dump
            except OSError as problem:
                log.error("%s: no dump can be written to %s: %s", why, self._folder, problem.strerror or problem)
                return False
            if not asked:
                self._troubled_step = self._step
            elif run.world.rank == 0:
                log.warning("%s: dumped collectives and threads to %s", why, self._folder)
            return True

    def _ask_others(self, why: str) -> None:
        assert self._run is not None and self._requests is not None
        try:
            self._requests.ask(why, self._run.world.rank)
        except OSError as problem:
            log.error("dumps of the other ranks cannot be requested in %s: %s", self._folder, problem.strerror or problem)

    def _tell(self, why: str) -> None:
        """On rank 0, in the watchdog's thread: say so, and when the others have dumped, what it comes from, each such thing
        once."""
        run = self._run
        if run is None or run.world.rank != 0 or self._watchdog is None:
            return
        command = f"`titan flight analyse {run.dump_folder}`"
        dumped = f"{why}: dumped collectives and threads of each rank to {self._folder}; {command} reads them"
        first, step = not self._told, self._step
        if first:
            log.warning("%s", dumped)  # whatever becomes of the verdict
        verdict = ""
        if run.world.size <= MOST_ANALYSED:
            self._watchdog.pause()
            found = analyse(read_dumps(self._folder))
            late = found.kind in ("behind", "elsewhere")
            news = ("late" if late else found.kind, *found.culprits)
            if news in self._told:
                return  # such as steps that are slow whenever a loader is
            self._told.add(news)
            verdict = found.verdict
        if not first:
            log.warning("%s", dumped)
        if verdict:
            log.warning("%s", verdict)
        run.report(Finding("hang", f"{why}: {verdict}" if verdict else why, step))
