"""How do I watch a run, add figures, keep state?

An observer is an object with lifecycle hooks (:mod:`titan_core.api.hookspecs`), which an ``Observer`` (hook
``titan_debuggers``, or ``titan_metric_loggers``) builds::

    class Spikes:
        @hookimpl
        def titan_step_end(self, report: StepReport) -> None: ...

        @hookimpl
        def titan_figures(self, record: Record) -> dict[str, float]:
            return {"spikes": self.count}

* ``Observer``: the component: when the object is built, on which ranks, and whether it may fail
* ``Record``: the metrics of a logged step by name
* ``Run``: the run that starts: job, ranks, parts of the model; reports findings
* ``StepReport``: a completed step: loss, gradient norm, learning rate, number of targets
* ``PendingUpdate``: a step whose update can still be skipped, and whose forward pass can be repeated
* ``ValidationReport``: the result of a validation
* ``RunEnd``: how a run ended, and after which step
* ``Finding``: an observation to show to the user, such as a loss spike
* ``SharedRequest``: a request of any rank that all ranks serve in the same step
* ``DeferredReports``: base class that reads a step's values once they have arrived
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan_core.api._lazy import getter, names_of

if TYPE_CHECKING:
    from titan_core.api.observe.components import Observer as Observer
    from titan_core.api.observe.deferred_reports import DeferredReports as DeferredReports
    from titan_core.api.observe.events import (
        Finding as Finding,
        PendingUpdate as PendingUpdate,
        Record as Record,
        Run as Run,
        RunEnd as RunEnd,
        StepReport as StepReport,
        ValidationReport as ValidationReport,
    )
    from titan_core.api.observe.shared_request import SharedRequest as SharedRequest
else:
    __getattr__ = getter(__name__, "observe")
    __all__ = names_of("observe")
