"""What a restart costs, from the failure to the next completed step."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import asdict, dataclass

from titan_core.api import Finding, JobContext, Run, StepReport, hookimpl
from titan_core.toolkit.launching import RESTART
from titan_core.toolkit.status import finished

log = logging.getLogger(__name__)

KIND = "recovery"
"""Kind of the finding that records the cost in the run's events."""


@dataclass(frozen=True)
class Restart:
    """What the launcher knows about a restart. Times are in seconds since the epoch."""

    failed: float
    """When the first rank failed, as far as it is known; for a hang, when the step began."""
    noticed: float
    """When the launcher saw it."""
    ended: float
    """When the last rank had ended."""
    waited: float
    """Seconds that the launcher then waited on purpose (``--restart-wait``)."""
    started: float
    """When the new ranks were started."""
    completed: int
    """The last step that was completed before."""

    def as_text(self) -> str:
        """Return the value of :data:`RESTART`."""
        return json.dumps(asdict(self))


class RecoveryReport:
    """Prints and records the cost, on rank 0, once the first step after a restart is complete."""

    def __init__(self, context: JobContext[None]) -> None:
        self._restart: Restart | None = Restart(**json.loads(os.environ[RESTART]))
        self._run: Run | None = None

    @hookimpl(trylast=True)
    def titan_train_start(self, run: Run) -> None:
        """Note the start of the first step."""
        self._run, self._began = run, time.time()

    @hookimpl(trylast=True)
    def titan_step_end(self, report: StepReport) -> None:
        """Report the cost of the restart."""
        restart, self._restart = self._restart, None
        run = self._run
        if restart is None or run is None or run.world.rank != 0:
            return
        if run.world.device.type == "cuda":
            report.loss.item()  # the step is complete when the device has computed it
        now = time.time()
        message = recovery_line(restart, _seconds_by_phase(restart, self._began, now), now, run.step)
        log.info("%s", message)
        run.report(Finding(KIND, message, report.step))


def _seconds_by_phase(restart: Restart, began: float, now: float) -> dict[str, float]:
    """Return the seconds of each part of this process's start.

    Args:
        began: when the first step began, in seconds since the epoch.
    """
    offset = time.time() - time.monotonic()
    phases = {name: (first + offset, last + offset) for name, first, last in finished}
    imported = phases.get("importing torch", (restart.started, restart.started))[1]
    spent = {name: last - first for name, (first, last) in phases.items()}
    join, restore = spent.get("joining the other ranks", 0.0), spent.get("loading the checkpoint", 0.0)
    return {
        "import": imported - restart.started,
        "join": join,
        "build": began - imported - join - restore,
        "restore": restore,
        "first step": now - began,
    }


def recovery_line(restart: Restart, start: dict[str, float], now: float, resumed: int) -> str:
    """Return the cost of a restart in one line.

    Args:
        start: seconds by part of the new ranks' start.
        now: when the first step was complete, in seconds since the epoch.
        resumed: the step after which the ranks resumed.
    """
    parts = {
        "detect": restart.noticed - restart.failed,
        "stop": restart.ended - restart.noticed,
        "wait": restart.waited,
        "rendezvous": restart.started - restart.ended - restart.waited,
        **start,
    }
    shown = ", ".join(
        f"{name} {max(0.0, seconds):.1f}" for name, seconds in parts.items() if name != "wait" or seconds >= 0.05
    )
    again = max(0, restart.completed - resumed)
    return f"recovered in {now - restart.failed:.1f} s: {shown}; {again} step{'s' * (again != 1)} trained again"
