"""The metric ``expert_load/busiest``: the rows of the busiest expert of any layer, relative to the mean of its layer."""

from torch import Tensor

from titan_core.api import JobContext, StepReport, hookimpl


class ExpertLoad:
    """Reports 1 if all experts are equally busy, and ``n_experts / top_k`` if all tokens choose the same."""

    def __init__(self, context: JobContext[None]) -> None:
        self._rows: Tensor | None = None

    @hookimpl
    def titan_step_end(self, report: StepReport) -> None:
        self._rows = report.statistics["expert_rows"]  # on the device: reading it waits, so only logged steps do

    @hookimpl
    def titan_figures(self) -> dict[str, float]:
        assert self._rows is not None
        rows = self._rows.double()
        return {"expert_load/busiest": (rows.amax(1) / rows.mean(1)).max().item()}
