"""Late reports, and the guard against losses and gradient norms that are not finite."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from harness.contexts import job_context
from harness.one_of_many import OneOfMany
from titan_core.api import DeferredReports, Finding, StepReport
from titan_core.api.config.sections import TrainingSection
from titan_core.api.observe import deferred_reports
from titan_core.loop.finite_guard import MOST_SKIPPED, FiniteGuard, NonFiniteError


def report(step: int, loss: float = 1.0, norm: float = 1.0) -> StepReport:
    return StepReport(step, torch.tensor(loss), torch.tensor([loss]), torch.tensor(norm), 0.1, 4, 0, 0.0)


class Looks(DeferredReports):
    """Records the reports that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.looked: list[int] = []

    def process(self, report: StepReport) -> None:
        assert report.loss.item() == report.step
        self.looked.append(report.step)


def test_reports_on_a_cpu_are_read_at_once() -> None:
    looks = Looks()
    looks.titan_step_end(report(1, 1.0))
    looks.titan_flush(1)
    looks.titan_flush(1)
    assert looks.looked == [1]


def test_reports_on_a_gpu_are_read_during_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses tensors that claim to be on a GPU."""
    waited: list[int] = []

    class Copy:
        def __init__(self, tensors: list[Any]) -> None:
            self.step = tensors[0].step

        def wait(self) -> list[Tensor]:
            waited.append(self.step)
            return [torch.tensor(float(self.step)), torch.tensor([0.0]), torch.tensor(2.0)]

    monkeypatch.setattr(deferred_reports, "HostCopy", Copy)
    looks = Looks()
    for step in (1, 2, 3):
        looks.titan_step_end(replace(report(step), loss=cast(Any, SimpleNamespace(is_cuda=True, step=step))))
        assert looks.looked == waited == list(range(1, step))
    looks.titan_flush(3)
    looks.titan_flush(3)
    assert looks.looked == [1, 2, 3]


def guard(action: Any) -> tuple[FiniteGuard, list[Finding]]:
    found: list[Finding] = []
    finite_guard = FiniteGuard(job_context(TrainingSection(on_nan=action)))
    finite_guard.titan_train_start(cast(Any, SimpleNamespace(report=found.append, world=OneOfMany({}))))
    return finite_guard, found


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (1.0, math.inf)])
def test_a_step_that_is_not_finite_is_skipped_reported_or_ends_the_run(loss: float, norm: float) -> None:
    bad, good = report(3, loss, norm), report(2)
    skip, found = guard("skip")
    assert not skip.titan_before_update(cast(Any, good))
    assert skip.titan_before_update(cast(Any, bad))
    skip.process(good)
    skip.process(replace(bad, skipped=True))
    assert [finding.step for finding in found] == [3]
    warn, found = guard("warn")
    assert warn.titan_before_update(cast(Any, bad)) is None
    warn.process(bad)
    assert [finding.step for finding in found] == [3]
    stop, found = guard("stop")
    assert stop.titan_before_update(cast(Any, bad))
    stop.process(good)
    with pytest.raises(NonFiniteError, match="step 3: the loss is"):
        stop.process(replace(bad, skipped=True))


def test_too_many_successive_bad_steps_end_the_run_across_restarts() -> None:
    skip, _ = guard("skip")
    bad, good = replace(report(1, math.nan), skipped=True), report(1)
    for _ in range(MOST_SKIPPED - 1):
        skip.process(bad)
    skip.process(good)  # the row is interrupted
    for _ in range(MOST_SKIPPED - 1):
        skip.process(bad)
    again, _ = guard("skip")
    again.titan_restore_state(skip.titan_save_state())
    with pytest.raises(NonFiniteError, match=f"the {MOST_SKIPPED}th such step in a row"):
        again.process(bad)
