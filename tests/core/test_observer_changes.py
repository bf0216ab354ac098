"""An observer that changes a tensor of the run is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.odd_plugin import ORIGIN
from titan_core.api import hookimpl
from titan_core.plugins.lifecycle import Lifecycle
from titan_testing.jobs import TINY, run_recipe


class Changes:
    """Changes a tensor of the run in step 2."""

    def __init__(self, hook: str, change: Callable[[Any, list[Any]], object]) -> None:
        self.hook, self.change, self.parameters = hook, change, list[Any]()

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        self.parameters = list(run.parts[0].module.parameters())

    @hookimpl
    def titan_gradients_complete(self, step: int) -> None:
        self._apply("titan_gradients_complete", step, None)

    @hookimpl
    def titan_before_update(self, update: Any) -> None:
        self._apply("titan_before_update", update.step, update)

    @hookimpl
    def titan_step_end(self, report: Any) -> None:
        self._apply("titan_step_end", report.step, report)

    def _apply(self, hook: str, step: int, argument: Any) -> None:
        if hook == self.hook and step == 2:
            with torch.no_grad():
                self.change(argument, self.parameters)


CHANGES: dict[str, tuple[str, Callable[[Any, list[Any]], object], str]] = {
    "loss": ("titan_before_update", lambda update, _: update.loss.zero_(), "loss"),
    "a view of the loss": ("titan_step_end", lambda report, _: report.loss.view(1)[0].mul_(2), "loss"),
    "rank losses": ("titan_step_end", lambda report, _: report.rank_losses.add_(1), "(rank_losses|loss)"),
    "norm": ("titan_before_update", lambda update, _: update.grad_norm.mul_(0), "grad_norm"),
    "tokens": ("titan_before_update", lambda update, _: update.microbatches[-1].tokens.fill_(0), "a microbatch"),
    "targets": ("titan_before_update", lambda update, _: update.microbatches[0].targets[0].fill_(1), "a microbatch"),
    "gradient": ("titan_before_update", lambda _, parameters: parameters[3].grad.mul_(2), "a gradient"),
    "other gradient": ("titan_before_update", lambda _, all_: setattr(all_[0], "grad", all_[0].grad * 2), "a gradient"),
    "scaled gradient": ("titan_gradients_complete", lambda _, parameters: parameters[0].grad.mul_(2), "a gradient"),
    "weight": ("titan_step_end", lambda _, parameters: parameters[-1].add_(1), "a weight"),
    "weight with gradients": ("titan_gradients_complete", lambda _, parameters: parameters[0].mul_(2), "a weight"),
}


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("name", CHANGES)
def test_an_observer_that_changes_the_run_is_named(name: str, in_tmp: Path) -> None:
    hook, change, changed = CHANGES[name]
    with pytest.raises(ValueError, match=rf"Changes object .*: {hook} changed {changed}; observers must leave"):
        run_recipe("tiny", TINY, observers=[Changes(hook, change)])


def test_only_who_changed_a_tensor_is_named() -> None:
    lifecycle, weight = Lifecycle(), torch.nn.Parameter(torch.ones(1))
    allowed = Changes("titan_gradients_complete", lambda _, parameters: parameters[0].add_(1))
    innocent = Changes("", lambda *_: None)
    lifecycle.register(innocent, origin=ORIGIN)
    lifecycle.register(allowed, origin=ORIGIN, changes_weights=True)
    lifecycle.register(Changes("", lambda *_: None), origin=ORIGIN)
    lifecycle.watch([weight])
    allowed.parameters = [weight]
    lifecycle.gradients_complete(2)
    assert weight.item() == 2
