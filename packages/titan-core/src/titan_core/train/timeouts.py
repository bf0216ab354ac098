"""How long collectives may take: longer until the first step is done, shorter from then on."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from titan_core.api.events import RunStart, StepReport
from titan_core.api.hookspecs import hookimpl
from titan_core.api.sections import CommSection
from titan_core.api.torch_private import process_groups
from titan_core.api.world import BACKGROUND

SETTABLE = {"gloo", "nccl"}
"""Backends whose timeout can be set; of others torch 2.11 raises (the fake one), 2.15 warns."""


class CollectiveTimeouts:
    """Sets ``[comm]``'s timeouts on all process groups that there are by then, those of the mesh too. A group that is made
    after the first step has the timeout that its maker gives it."""

    def __init__(self, section: CommSection) -> None:
        self._section = section
        self._shortened = False

    @hookimpl
    def titan_train_start(self, run: RunStart) -> None:
        """Groups of the mesh were made with torch's own default, whatever the first group has."""
        _set_timeouts(self._section.init_timeout_seconds)

    @hookimpl
    def titan_step_end(self, report: StepReport) -> None:
        """All is built and compiled once a step is done."""
        if not self._shortened:
            self._shortened = True
            _set_timeouts(self._section.train_timeout_seconds)


def _set_timeouts(seconds: int) -> None:
    """Set the timeout of every process group of this rank, except the groups that work in the background.

    ``ProcessGroup.set_timeout`` is undocumented (torch 2.11 to 2.15; checked with gloo).
    """
    for group in process_groups():
        backends = {one.partition(":")[2] for one in dist.get_backend_config(group).split(",")}
        if backends <= SETTABLE and group.group_desc != BACKGROUND:
            group.set_timeout(timedelta(seconds=seconds))
