"""A run that notes the biases of the choice of experts after each step."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from harness.jobs import RunRecord, run_recipe

Biases = dict[str, list[Tensor]]
"""Name of a buffer -> its values after each step."""


def biases_of(folder: str, recipe: str, overrides: dict[str, object], ending: str) -> tuple[RunRecord, Biases]:
    """Train in ``folder``, and return the record and the biases of this rank's blocks after each step.

    Args:
        ending: of the names of the biases.
    """
    from titan_core.api import hookimpl

    os.chdir(folder)
    found: Biases = {}

    class Observed:
        @hookimpl
        def titan_train_start(self, run: Any) -> None:
            named = (pair for part in run.parts for pair in part.module.named_buffers())
            self.biases = {name: bias for name, bias in named if name.endswith(ending)}

        @hookimpl(trylast=True)
        def titan_step_end(self) -> None:
            for name, bias in self.biases.items():
                found.setdefault(name, []).append(bias.clone())

    return run_recipe(recipe, {"job.device": "cpu", **overrides}, weights=True, observers=[Observed()]), found
