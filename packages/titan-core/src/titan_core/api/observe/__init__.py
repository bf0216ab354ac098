"""How do I watch a run, add figures, keep state?

An observer is an object with lifecycle hooks (:mod:`titan_core.api.hookspecs`), built if the job selects it::

    class Spikes:
        @hookimpl
        def titan_step_end(self, report: StepReport) -> None: ...

        @hookimpl
        def titan_figures(self, record: Record) -> dict[str, float]:
            return {"spikes": self.count}

* ``Observer``: an observer, built if the job selects it
* ``Record``: the metrics of a logged step
* ``Run``: the running job
* ``StepReport``: one step
* ``PendingUpdate``: a step before its update
* ``ValidationReport``: one validation
* ``RunEnd``: how a run ended
* ``Finding``: an observation for the user
* ``SharedRequest``: a request that all ranks serve in one step
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
        Run as Run,
        RunEnd as RunEnd,
        StepReport as StepReport,
        ValidationReport as ValidationReport,
    )
    from titan_core.api.observe.metric_log import Record as Record
    from titan_core.api.observe.shared_request import SharedRequest as SharedRequest
else:
    __getattr__ = getter(__name__, "observe")
    __all__ = names_of("observe")
