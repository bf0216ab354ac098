"""Detects losses far above the preceding ones by the method of OLMo-core's stability monitor (6 sigma over 128 steps)."""

from __future__ import annotations

import logging
import math
import os
import statistics
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from titan_core.api import (
    Checkpoint,
    Command,
    DeferredReports,
    Finding,
    JobContext,
    PendingUpdate,
    Run,
    StepReport,
    UserError,
    hookimpl,
)
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.device import HostCopy
from titan_core.toolkit.errors import NumericsStop
from titan_core.toolkit.launching import LOCKED
from titan_core.toolkit.processes import python
from titan_core.toolkit.runs.run_log import RunLog
from titan_debug.config import NumericsSection

log = logging.getLogger(__name__)

FEWEST = 32
"""Number of losses needed before a spike can be detected; less if the window is shorter."""


STATE = "loss_spike"
"""Key of the state in checkpoints."""
_COMMAND = "run rewind"
_KEY = "numerics.spike_action"


class LossSpikeError(NumericsStop):
    """The loss spiked, and ``numerics.spike_action`` is ``"stop"``."""


class SpikeDetector:
    """Compares each loss with the mean and standard deviation of the last ones. These include spikes, so a loss that stays
    high becomes the new level and is reported only a few times."""

    def __init__(self, window: int, sigma: float) -> None:
        self.losses: deque[float] = deque(maxlen=window)
        """The last losses, oldest first."""
        self._sigma = sigma

    def add(self, loss: float) -> str | None:
        """Add a loss. Return a message if it is a spike."""
        if not math.isfinite(loss):
            return None  # handled by training.on_nan
        message = None
        if len(self.losses) >= min(FEWEST, self.losses.maxlen or 0):
            mean = statistics.fmean(self.losses)
            # statistics.pstdev uses fractions, which takes ten times as long.
            deviation = math.dist(self.losses, [mean] * len(self.losses)) / math.sqrt(len(self.losses))
            if loss > mean + self._sigma * deviation:
                message = _message(loss, mean, deviation, len(self.losses))
        self.losses.append(loss)
        return message


class DeviceSpikeDetector:
    """:class:`SpikeDetector` on the device, which then skips the update of a spike without waiting for the host. Its dozen
    small kernels would cost more host time than a detector on the host, if no update is skipped."""

    def __init__(self, window: int, sigma: float) -> None:
        self._sigma, self._window = sigma, window
        self.load([])

    def load(self, losses: Sequence[float]) -> None:
        """Set the last losses, oldest first."""
        last = list(losses)[-self._window :]
        self._losses = torch.tensor([*last, *[0.0] * (self._window - len(last))], dtype=torch.float64)
        self._added = torch.tensor(len(last))

    def last_losses(self) -> list[float]:
        """Return the last losses, oldest first. Waits for the device."""
        added, losses = int(self._added), self._losses.tolist()
        return losses[:added] if added < self._window else losses[added % self._window :] + losses[: added % self._window]

    def add(self, loss: Tensor) -> Tensor:
        """Add a loss, a scalar. Return its verdict on the device, fp64: whether it is no spike, the loss itself, the mean
        and the standard deviation of the preceding losses, and their number."""
        if self._losses.device != loss.device:  # in the first step
            self._losses, self._added = self._losses.to(loss.device), self._added.to(loss.device)
        loss, losses, slots = loss.double(), self._losses, torch.arange(self._window, device=loss.device)
        number = self._added.clamp(max=self._window)
        present, some = slots < number, number.clamp(min=1)
        mean = losses.sum() / some  # slots without a loss hold 0
        deviation = (torch.where(present, losses - mean, 0.0).square().sum() / some).sqrt()
        finite = torch.isfinite(loss)
        spike = finite & (number >= min(FEWEST, self._window)) & (loss > mean + self._sigma * deviation)
        self._losses = torch.where(finite & (slots == self._added % self._window), loss, losses)
        self._added = self._added + finite
        return torch.stack([(~spike).double(), loss, mean, deviation, number.double()])


def _message(loss: float, mean: float, deviation: float, number: int) -> str:
    away = f"{(loss - mean) / deviation:.1f} standard deviations above" if deviation else "above"
    return f"the loss is {loss:.4f}, {away} the mean of the preceding {number} losses ({mean:.4f})"


class LossSpikes(DeferredReports):
    """Handles loss spikes. On a GPU it warns or stops one step late, so that the host does not wait; whether to skip an
    update is decided on the device."""

    def __init__(self, context: JobContext[NumericsSection]) -> None:
        section = context.section
        super().__init__()
        self._action: Literal["warn", "skip", "rewind", "stop"] = section.spike_action  # type: ignore[assignment]  # inactive if "off"
        self._detector = SpikeDetector(section.spike_window, section.spike_sigma)
        self._on_device = DeviceSpikeDetector(section.spike_window, section.spike_sigma)  # if updates are skipped
        self._verdicts: deque[HostCopy] = deque()
        self._run: Run | None = None
        self._most_rewinds = section.spike_rewinds

    @hookimpl
    def titan_job_assembled(self, job: AssembledJob) -> None:
        """
        Raises:
            UserError: the job cannot go back from a spike.
        """
        if self._action == "rewind":
            require_rewinding(job)

    @hookimpl
    def titan_save_state(self) -> dict[str, list[float]]:
        """Save the last losses so that a resumed run judges the next loss as an uninterrupted run would."""
        return {STATE: self._on_device.last_losses() if self._action == "skip" else list(self._detector.losses)}

    @hookimpl
    def titan_restore_state(self, state: Mapping[str, Any]) -> None:
        """Restore the losses from a checkpoint."""
        self._detector.losses.clear()
        self._detector.losses.extend(state.get(STATE, ()))
        self._on_device.load(state.get(STATE, ()))

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Keep the run for findings."""
        self._run = run
        self._rewinds = len(run.world.on_first_rank(lambda: rewinds_of(run.dump_folder))) if self._action == "rewind" else 0

    @hookimpl
    def titan_before_update(self, update: PendingUpdate) -> Tensor | None:
        """Return whether to skip the update."""
        if self._action != "skip":
            return None
        verdict = self._on_device.add(update.loss)
        self._verdicts.append(HostCopy([verdict]))
        return verdict[0] == 0

    def process(self, report: StepReport) -> None:
        """Warn of a spike or stop the run.

        Raises:
            LossSpikeError: the loss is a spike and ``spike_action`` is ``"stop"``.
        """
        if self._action == "skip":
            usual, loss, mean, deviation, number = self._verdicts.popleft().wait()[0].tolist()
            if not usual:
                self._report(report.step, f"{_message(loss, mean, deviation, int(number))}; skipping its update")
            return
        message = self._detector.add(report.loss.item())
        if message is None:
            return
        self._report(report.step, message)
        run = self._run
        if self._action == "rewind" and run is not None:
            if self._rewinds == self._most_rewinds:
                raise LossSpikeError(
                    f"step {report.step}: {message}; stopped because the run has gone back {self._rewinds} times already "
                    "(numerics.spike_rewinds). Lower optimizer.lr, or rewind further by `titan run rewind`"
                )
            run.restart(partial(rewind, run.job, report.step))
        if self._action == "stop":
            raise LossSpikeError(
                f'step {report.step}: {message}; stopped because numerics.spike_action = "stop". Resume from an older '
                'checkpoint with a lower optimizer.lr or with spike_action = "skip", or raise numerics.spike_sigma'
            )

    def _report(self, step: int, message: str) -> None:
        run = self._run
        if run is not None and run.world.rank == 0:
            log.warning("step %d: %s", step, message)
            run.report(Finding("loss spike", message, step))


def require_rewinding(job: AssembledJob) -> None:
    """
    Raises:
        UserError: the job cannot go back to a checkpoint.
    """
    if job.checkpoint is None:
        why = "goes back to a checkpoint, and this job saves none"
        raise UserError(job.config.problem(_KEY, why, "set checkpoint.enable = true, or another action"))
    if _COMMAND not in job.registry.names(Command):
        raise UserError(job.config.problem(_KEY, "needs `titan run rewind`", "install titan-data, or set another action"))


def rewinds_of(folder: str) -> list[int]:
    """Return the steps to which the run has gone back."""
    return [event["step"] for event in RunLog.read_events(Path(folder)) if event["event"] == "rewind"]


def rewind(job: AssembledJob, step: int) -> None:
    """Go back to the newest checkpoint before ``step``, and pass over the documents of this step. For rank 0.

    Where the run has gone back before, the cause of the spike may have begun earlier: it goes back further.

    Raises:
        UserError: there is no such checkpoint, or the documents cannot be passed over from there on.
    """
    checkpoint = job.checkpoint
    assert isinstance(checkpoint, Checkpoint)
    find, found, upto = checkpoint.find_position, None, step - 1
    used = rewinds_of(job.dump_folder)
    while find is not None:
        found = find.load()(checkpoint.context(job), upto)
        if found is None or found.step not in used:
            break
        upto = found.step - 1
    if found is None:
        why = f"the loss spiked in step {step}, and there is no checkpoint before it to go back to"
        raise UserError(job.config.problem(_KEY, why, "lower checkpoint.interval, or set another action"))
    arguments = [*_COMMAND.split(), job.dump_folder, "--to", str(found.step), "--without-steps", str(step)]
    environment = {**os.environ, LOCKED: str(Path(job.dump_folder).resolve())}  # this process has the lock
    done = subprocess.run(
        python("-m", "titan_core", *arguments), env=environment, capture_output=True, text=True, check=False
    )
    for line in done.stdout.splitlines()[:-1]:  # without the command that continues the run
        log.warning("%s", line)
    if done.returncode:
        raise UserError.one(f"titan {' '.join(arguments)}", done.stderr.strip() or "failed", "rewind by hand, further back")
