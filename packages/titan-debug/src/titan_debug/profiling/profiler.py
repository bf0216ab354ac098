"""Torch profiler traces, written periodically and when a process receives SIGUSR2."""

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

from titan_core.api import Finding, JobContext, Run, StepReport, hookimpl
from titan_core.toolkit.atomic_write import atomic_write
from titan_debug.config import ProfilingSection, require_ranks

log = logging.getLogger(__name__)

_COMPRESSION = 6
"""gzip level. For a trace of 190 MB it is four times as fast as the highest level, and the file a tenth larger. Training
waits while the trace is compressed."""


class Profiler:
    """Writes ``<save_traces_folder>/step-N/rank-R.json.gz`` in the run's directory, where N is the last step in the trace.

    A regular trace covers the last ``profiler_active`` of every ``profile_freq`` steps, after ``profiler_warmup`` steps of
    warmup. A trace requested by SIGUSR2 starts its warmup at the next step. It waits for a trace in progress, and replaces
    a regular trace that would start meanwhile.

    The mark ``ProfilerStep#N`` extends from the ``titan_step_start`` of step N to that of the next step; the mark of the
    last step ends at its ``titan_step_end``.
    """

    def __init__(self, context: JobContext[ProfilingSection]) -> None:
        self._context = context
        self._section = context.section
        self._run: Run | None = None
        self._profile: profile | None = None  # the trace in progress; almost always None
        self._requested = False  # by SIGUSR2
        self._next = 0  # first step of the next regular warmup; 0 if this rank writes no regular traces
        self._last = 0  # last step of the trace in progress
        self._written = False  # whether the latest trace was written
        self._handler: Any = None  # the previous handler of SIGUSR2
        self._handles = False

    @hookimpl
    def titan_job_assembled(self) -> None:
        """Check ``profiling.ranks``.

        Raises:
            UserError: the job has no such rank.
        """
        require_ranks(self._context)

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Install the handler of SIGUSR2, and schedule the first trace."""
        self._run = run
        self._next = self._next_warmup(run.step)
        # Python allows signal handlers in the main thread only. In another thread, SIGUSR2 keeps its handler.
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGUSR2, self._on_usr2)
            self._handles = True

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        """Start a trace if one is due, or mark the next step of the trace in progress."""
        if self._profile is not None:
            self._profile.step()
        elif self._requested or step == self._next:
            self._begin(step)

    @hookimpl(trylast=True)
    def titan_step_end(self, report: StepReport) -> None:
        """Write the trace after its last step."""
        if self._profile is not None and report.step >= self._last:
            self._finish()

    @hookimpl(wrapper=True)
    def titan_train_end(self) -> Generator[None, object, object]:
        """Write the steps that a trace in progress has recorded. A wrapper, so that it runs before any other observer can
        fail."""
        try:
            if self._profile is not None:
                self._finish()
                if not self._written:
                    log.info("no trace was written: the run ended during its warmup")
        finally:
            if self._handles:
                # signal.signal returned None if the handler was not installed from Python; it cannot be restored.
                signal.signal(signal.SIGUSR2, signal.SIG_DFL if self._handler is None else self._handler)
                self._handles = False
        return (yield)

    def _on_usr2(self, number: int, frame: FrameType | None) -> None:
        self._requested = True

    def _next_warmup(self, step: int) -> int:
        """Return the first step after ``step`` at which a regular warmup starts; 0 if there are no regular traces."""
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
            # Without this, Kineto logs an error at its first start because it finds no GPU.
            os.environ.setdefault("KINETO_LOG_LEVEL", "5")
        self._requested, self._written = False, False
        recorded = step + section.profiler_warmup
        self._last = recorded + section.profiler_active - 1

        def action(number: int) -> ProfilerAction:
            # The constructor calls this for step 0, before `step_num` is set to ``step``.
            return ProfilerAction.WARMUP if max(number, step) < recorded else ProfilerAction.RECORD

        # A new profiler for each trace, so that profiling costs nothing between traces. `_finish` always stops it.
        self._profile = profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU],
            schedule=action,
            on_trace_ready=self._write,
            record_shapes=section.record_shapes,
            with_stack=section.with_stack,
            acc_events=True,  # no effect for a single recording, but torch 2.11 warns without it
        )
        self._profile.step_num = step  # N in the mark ProfilerStep#N
        self._profile.start()

    def _finish(self) -> None:
        """Stop the profiler, which writes the trace."""
        profiler, self._profile = self._profile, None
        assert profiler is not None
        self._next = self._next_warmup(profiler.step_num)
        profiler.stop()

    def _write(self, profiler: profile) -> None:
        """Write the trace. A failure is logged and does not stop training."""
        assert self._run is not None
        run, step = self._run, profiler.step_num
        path = Path(run.dump_folder, self._section.save_traces_folder, f"step-{step}", f"rank-{run.world.rank}.json.gz")
        try:
            with atomic_write(path) as part:
                _export(profiler, part)
        except OSError as error:
            log.error("cannot write trace %s: %s; training continues", path, error.strerror or error)
            return
        self._written = True
        log.info("wrote trace %s", path)
        if run.world.rank == 0:
            run.report(Finding("trace", f"{path}", step))


def _export(profiler: profile, target: Path) -> None:
    """Write the trace as gzipped Chrome JSON. Torch can compress the trace itself, but uses the system's temporary
    directory, which may be small, and the slowest compression level."""
    plain = target.with_suffix(".json")
    try:
        profiler.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(target, "wb", compresslevel=_COMPRESSION) as compressed:
            shutil.copyfileobj(source, compressed, 1 << 20)
    finally:
        plain.unlink(missing_ok=True)
