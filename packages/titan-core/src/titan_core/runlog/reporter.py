"""Step reports to records of metrics, and the file ``metrics.jsonl``."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from titan_core.api import JobContext, Record, Run, RunEnd, StepReport, TrainState, ValidationReport, World, hookimpl
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.plugins.lifecycle import Lifecycle
from titan_core.runlog.event_log import EventLog
from titan_core.runlog.time_by_cause import SpentTime, Stopwatch
from titan_core.toolkit.device import memory, synchronize
from titan_core.toolkit.json_lines import LineFile
from titan_core.toolkit.runs.files import METRICS

log = logging.getLogger(__name__)


class MetricsReporter:
    """An observer that measures between logged steps. All ranks take part, because any rank may have the slowest loader or
    the fullest memory; rank 0 has the records."""

    def __init__(
        self,
        job: AssembledJob,
        world: World,
        state: TrainState,
        lifecycle: Lifecycle,
        stopwatch: Stopwatch,
        spent: SpentTime,
        events: EventLog,
    ) -> None:
        self._job = job
        self._world = world
        self._state = state
        self._stopwatch = stopwatch
        self._spent, self._events = spent, events
        self._lifecycle = lifecycle
        self._unlogged: StepReport | None = None
        self._taken = 0  # steps in the window; not a difference of step numbers, which a replaced state makes jump
        self._skipped: int | torch.Tensor = 0
        lifecycle.register(self)

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Start the clock."""
        if self._world.rank == 0:
            self._flops_per_token = self._job.flops_per_token
        self._begin_window()

    @hookimpl(trylast=True)
    def titan_step_end(self, report: StepReport) -> None:
        """Log the first step, the last step and every ``metrics.log_freq``-th step."""
        self._taken += 1
        self._data_seconds += report.data_seconds
        self._targets += report.num_targets
        self._skipped = self._skipped + report.skipped  # a tensor if the device decides
        if report.logged:
            self._log(report)
        else:
            self._unlogged = report

    @hookimpl
    def titan_validation_end(self, report: ValidationReport) -> None:
        """Log a separate record. The time of validation does not count as training time."""
        if self._world.rank == 0:
            of = "".join(f"/{part}" for part in (report.name, report.dataset) if part)
            self._lifecycle.metrics(
                {
                    "step": report.step,
                    f"validation_loss{of}": _finite(report.loss),
                    f"validation_tokens{of}": report.num_targets,
                    f"validation_seconds{of}": report.seconds,
                    **{f"objective/{name}{of}": _finite(value) for name, value in report.metrics.items()},
                    "time": time.time(),
                }
            )
        if not report.dataset:  # whose time is in that of all
            self.exclude(report.seconds)

    @hookimpl(tryfirst=True)
    def titan_train_end(self, end: RunEnd) -> None:
        """Log the last step if the data ended early."""
        if self._unlogged is not None and not end.failed:
            self._log(self._unlogged)

    def exclude(self, seconds: float) -> None:
        """Do not count ``seconds``, which just passed, as training time."""
        self._started += seconds

    def _log(self, report: StepReport) -> None:
        self._unlogged = None
        phases = self._stopwatch.take()  # waits for the device
        computed = phases.get("forward_backward", 0.0) + phases.get("optimizer", 0.0)
        self._spent.limit_data(max(0.0, time.perf_counter() - self._started - computed))
        of_ranks, elapsed = self._over_ranks(self._taken)
        if self._world.rank == 0:
            record = {**self._record(report, phases), **of_ranks, "time": time.time()}
            self._lifecycle.metrics({**record, **self._lifecycle.figures(record)})
        if self._spent.is_due(elapsed):
            self._events.log_spent(report.step)
        self._begin_window()

    def _begin_window(self) -> None:
        self._taken = 0
        self._targets = 0
        self._skipped = 0
        self._data_seconds = 0.0
        self._stopwatch.take()
        self._started = time.perf_counter()

    def _record(self, report: StepReport, phases: Mapping[str, float]) -> Record:
        loss, loss_max, grad_norm = report.loss.item(), report.rank_losses.max().item(), report.grad_norm.item()
        synchronize(self._world.device)
        seconds = time.perf_counter() - self._started
        steps = self._taken
        tokens_per_second = self._targets / seconds
        return {
            "step": report.step,
            "loss": _finite(loss),
            "loss_max": _finite(loss_max),
            "grad_norm": _finite(grad_norm),
            "lr": report.lr,
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": tokens_per_second / self._world.size,
            "tflops": tokens_per_second * self._flops_per_token / self._world.size / 1e12,
            "step_seconds": seconds / steps,
            "forward_backward_seconds": phases.get("forward_backward", 0.0) / steps,
            "optimizer_seconds": phases.get("optimizer", 0.0) / steps,
            "checkpoint_seconds": phases.get("checkpoint", 0.0) / steps,
            "tokens_seen": self._state.tokens_seen,
            "epoch": report.epoch,
            "corrupt_records": report.corrupt,
            "empty_documents": report.empty,
            "skipped_steps": int(self._skipped),
            **{f"auxiliary/{name}": _finite(value.item()) for name, value in report.auxiliary.items()},
            **{f"objective/{name}": _finite(value.item()) for name, value in report.metrics.items()},
            **self._tokens_by_dataset(),
        }

    def _over_ranks(self, steps: int) -> tuple[Record, float]:
        """Return the maximum over ranks of the seconds waited for data, per step, and of memory figures; and of the seconds
        since the attempt began."""
        now = memory(self._world.device)
        retries = -1 if now.retries is None else now.retries
        reserved = -1.0 if now.reserved_gib is None else now.reserved_gib
        mine = [self._data_seconds / steps, now.active_gib, reserved, now.peak_gib, retries, self._spent.elapsed()]
        data, active, reserved, peak, retries, elapsed = self._world.max(torch.tensor(mine, dtype=torch.float64)).tolist()
        found: Record = {
            "data_seconds": data,
            "memory_active_gib": active,
            "memory_reserved_gib": None if reserved < 0 else reserved,
            "memory_peak_gib": peak,
            "memory_retries": None if retries < 0 else int(retries),
        }
        return found, elapsed

    def _tokens_by_dataset(self) -> dict[str, int]:
        """Return the number of target tokens seen from each dataset of a mixture."""
        tokens = self._state.tokens_by_dataset
        return {f"tokens_seen/{name}": count for name, count in tokens.items()} if len(tokens) > 1 else {}


def _finite(value: float) -> float | None:
    """Return ``None`` for NaN and infinity, which JSON lacks."""
    return value if math.isfinite(value) else None


class MetricsFile:
    """Appends to the file in the run's directory, so that a resumed run continues it."""

    def __init__(self, context: JobContext[None]) -> None:
        self._file: LineFile | None = None

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Open the file."""
        self._file = LineFile(Path(run.dump_folder) / METRICS)

    @hookimpl
    def titan_metrics(self, record: Record) -> None:
        """Append a line."""
        assert self._file is not None
        self._file.append(record)

    @hookimpl
    def titan_train_end(self, end: RunEnd) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
