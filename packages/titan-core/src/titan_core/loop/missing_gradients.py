"""Reports parameters that receive no gradient, which are silently not trained."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch import nn

from titan_core.api import Finding, World
from titan_core.plugins.lifecycle import Lifecycle
from titan_core.toolkit.random_state import same_generators

log = logging.getLogger(__name__)


class MissingGradients:
    """Reports each parameter without a gradient once. Of the ranks with the same layers, only the first reports."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], world: World, lifecycle: Lifecycle) -> None:
        self._trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self._reports = world.is_first_along("batch", "sequence", "weights")
        self._lifecycle = lifecycle
        self._reported: set[str] = set()

    def check(self, step: int) -> None:
        """Check the gradients of ``step`` before the optimizer's update."""
        names = [name for name, parameter in self._trained if parameter.grad is None and name not in self._reported]
        if not names or not self._reports:
            return
        self._reported.update(names)
        message = (
            f"step {step}: {len(names)} of {len(self._trained)} parameters received no gradient and are not trained: "
            f"{', '.join(names)}"
        )
        # An error, because ranks other than the first log only errors.
        log.error(
            "%s; freeze them (training.freeze) if that is intended, else compare with one device by `titan verify`", message
        )
        with same_generators():
            self._lifecycle.finding(Finding("no gradient", message, step))
