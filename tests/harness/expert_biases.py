"""A run that notes the biases of the choice of experts after each step."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from titan_core.api import hookimpl
from titan_testing.jobs import RunRecord, run_recipe

Biases = dict[str, list[Tensor]]
"""Name of a buffer -> its values after each step."""


class NotedBiases:
    """An observer that notes the biases of this rank's blocks after each step."""

    def __init__(self, ending: str) -> None:
        """
        Args:
            ending: of the names of the biases.
        """
        self.found: Biases = {}
        self._ending = ending

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        named = (pair for part in run.parts for pair in part.module.named_buffers())
        self._biases = {name: bias for name, bias in named if name.endswith(self._ending)}

    @hookimpl(trylast=True)
    def titan_step_end(self) -> None:
        for name, bias in self._biases.items():
            self.found.setdefault(name, []).append(bias.clone())


def biases_of(folder: str, recipe: str, overrides: dict[str, object], ending: str) -> tuple[RunRecord, Biases]:
    """Train in ``folder``; return the record and what :class:`NotedBiases` notes."""
    os.chdir(folder)
    noted = NotedBiases(ending)
    return run_recipe(recipe, {"job.device": "cpu", **overrides}, weights=True, observers=[noted]), noted.found
