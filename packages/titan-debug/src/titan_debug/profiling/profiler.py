"""Traces of torch's profiler: every so many steps, and whenever a process is sent SIGUSR2."""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import signal
import threading
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Any

from torch.profiler import ProfilerAction, ProfilerActivity, profile

from titan_core.api.build_context import JobContext
from titan_core.api.events import Finding, RunStart, StepReport
from titan_core.api.hookspecs import hookimpl
from titan_debug.config import ProfilingSection
from titan_debug.profiling.check import require_ranks
from titan_debug.whole_file import whole_file

log = logging.getLogger(__name__)

_COMPRESSION = 6
"""Of gzip: a tenth larger than at its best, and four times as fast (a trace of 190 MB). Training waits for it."""


class Profiler:
    """Writes ``<save_traces_folder>/step-N/rank-R.json.gz`` in the run's directory, where N is the last step in the trace.

    A trace every ``profile_freq`` steps: the last ``profiler_active`` steps of each stretch are in it, and the profiler runs
    for ``profiler_warmup`` steps before them. One that was requested by SIGUSR2 begins its warmup with the next step; it
    takes the place of a regular one that would begin meanwhile, and waits for one that has begun.

    A step is marked ``ProfilerStep#N``, from its ``titan_step_start`` to that of the next step, the last one to its
    ``titan_step_end``.
    """

    def __init__(self, context: JobContext[ProfilingSection]) -> None:
        self._context = context
        self._section = context.section
        self._run: RunStart | None = None
        self._profile: profile | None = None  # running; None almost always
        self._asked = False  # by a signal
        self._next = 0  # the step that the next regular warmup begins with; 0: there are no regular traces here
        self._last = 0  # the last step of the trace under way
        self._written = False  # whether something came of the trace under way
        self._handler: Any = None  # of SIGUSR2, before the run
        self._handles = False

    @hookimpl
    def titan_job_assembled(self) -> None:
        """See whether there are such ranks.

        Raises:
            UserError: there are not.
        """
        require_ranks(self._context)

    @hookimpl
    def titan_train_start(self, run: RunStart) -> None:
        """Listen to SIGUSR2, and find out when the first trace is due."""
        self._run = run
        self._next = self._after(run.step)
        # Python lets no other thread handle signals; there, SIGUSR2 does what it did.
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGUSR2, self._on_usr2)
            self._handles = True

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        """Begin a trace, or mark the next step of the one under way. Almost always there is nothing to do."""
        if self._profile is not None:
            self._profile.step()
        elif self._asked or step == self._next:
            self._begin(step)

    @hookimpl(trylast=True)
    def titan_step_end(self, report: StepReport) -> None:
        """Write the trace after its last step."""
        if self._profile is not None and report.step >= self._last:
            self._finish()

    @hookimpl(wrapper=True)
    def titan_train_end(self) -> Generator[None, object, object]:
        """Write a trace under way as far as it is. As a wrapper, so that no other observer's failure comes before."""
        try:
            if self._profile is not None:
                self._finish()
                if not self._written:
                    log.info("the run ended in the warmup of a trace, so there is none")
        finally:
            if self._handles:
                # A handler that was not installed from Python is returned as None, and cannot be installed again.
                signal.signal(signal.SIGUSR2, signal.SIG_DFL if self._handler is None else self._handler)
                self._handles = False
        return (yield)

    def _on_usr2(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def _after(self, step: int) -> int:
        """The first step after ``step`` that a regular warmup begins with; 0 where there are none."""
        section = self._section
        assert self._run is not None
        if not section.enable_profiling or (section.ranks is not None and self._run.world.rank not in section.ranks):
            return 0
        before = section.profile_freq - section.profiler_warmup - section.profiler_active
        return step + 1 + (before - step) % section.profile_freq

    def _begin(self, step: int) -> None:
        assert self._run is not None
        section, cuda = self._section, self._run.world.device.type == "cuda"
        if not cuda:
            # Its profiler looks for GPUs at its first start, and without this calls it an error that there are none.
            os.environ.setdefault("KINETO_LOG_LEVEL", "5")
        self._asked, self._written = False, False
        recorded = step + section.profiler_warmup
        self._last = recorded + section.profiler_active - 1

        def action(number: int) -> ProfilerAction:
            # torch calls it for step 0 when it is made, before it knows that it begins with ``step``.
            return ProfilerAction.WARMUP if max(number, step) < recorded else ProfilerAction.RECORD

        # A new one each time: between traces there is nothing that could cost time. Finished by `_finish`, in any case.
        self._profile = profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU],
            schedule=action,
            on_trace_ready=self._write,
            record_shapes=section.record_shapes,
            with_stack=section.with_stack,
            acc_events=True,  # it records once, so there is nothing to add to; without it torch 2.11 warns
        )
        self._profile.step_num = step  # the number in the mark
        self._profile.start()

    def _finish(self) -> None:
        """Stop the profiler, which writes what it has recorded."""
        profiler, self._profile = self._profile, None
        assert profiler is not None
        self._next = self._after(profiler.step_num)
        profiler.stop()

    def _write(self, profiler: profile) -> None:
        """Write the trace. A failure does not stop training: nothing depends on it."""
        assert self._run is not None
        run, step = self._run, profiler.step_num
        path = Path(run.dump_folder, self._section.save_traces_folder, f"step-{step}", f"rank-{run.world.rank}.json.gz")
        try:
            with whole_file(path) as part:
                _export(profiler, part)
        except OSError as error:
            log.error("trace %s cannot be written: %s; training continues", path, error.strerror or error)
            return
        self._written = True
        log.info("wrote trace %s", path)
        if run.world.rank == 0:
            run.report(Finding("trace", f"{path}", step))


def _export(profiler: profile, target: Path) -> None:
    """The trace as gzipped Chrome JSON. torch can compress too, by way of a file in the system's folder for temporary ones,
    which may be small, and as tightly as gzip can, which takes its time."""
    plain = target.with_suffix(".json")
    try:
        profiler.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(target, "wb", compresslevel=_COMPRESSION) as compressed:
            shutil.copyfileobj(source, compressed, 1 << 20)
    finally:
        plain.unlink(missing_ok=True)
