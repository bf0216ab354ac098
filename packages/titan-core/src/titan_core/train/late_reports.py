"""Reading the figures of steps without making a GPU wait."""

from __future__ import annotations

from titan_core.hookspecs import hookimpl
from titan_core.train.events import StepReport


class LateReports:
    """An observer that looks at each step's figures: at once on a CPU, where nothing is in flight; on a GPU when the next
    step has been issued, or before a checkpoint keeps what the step did."""

    def __init__(self) -> None:
        self._previous: StepReport | None = None

    def look(self, report: StepReport) -> None:
        """What the observer does about a step, whose tensors may be read now."""
        raise NotImplementedError

    @hookimpl
    def titan_step_end(self, report: StepReport) -> None:
        """Look at this step on a CPU, at the one before it on a GPU."""
        if report.loss.device.type == "cpu":
            self.look(report)
            return
        previous, self._previous = self._previous, report
        if previous is not None:
            self.look(previous)

    @hookimpl
    def titan_settle(self, step: int) -> None:
        """Look at the step that was not looked at yet."""
        previous, self._previous = self._previous, None
        if previous is not None:
            self.look(previous)
