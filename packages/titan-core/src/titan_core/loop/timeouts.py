"""Timeouts of collectives: long until the first step is done, shorter afterwards."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from titan_core.api import Run, StepReport, hookimpl
from titan_core.api.config.sections import CommSection
from titan_core.api.parallel.world import BACKGROUND
from titan_core.torch_private import process_groups

SETTABLE = {"gloo", "nccl"}
"""Backends whose timeout can be set. For others, such as the fake backend, torch 2.11 raises and torch 2.15 warns."""


class CollectiveTimeouts:
    """Sets the timeouts of ``[comm]`` on all existing process groups, including those of the mesh. Groups made after the
    first step keep the timeout that they were made with."""

    def __init__(self, section: CommSection) -> None:
        self._section = section
        self._shortened = False

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Set the initial timeout. Groups of the mesh were made with torch's default, not with that of the first group."""
        _set_timeouts(self._section.init_timeout_seconds)

    @hookimpl
    def titan_step_end(self, report: StepReport) -> None:
        """Set the shorter timeout after the first step, when everything is built and compiled."""
        if not self._shortened:
            self._shortened = True
            _set_timeouts(self._section.train_timeout_seconds)


def _set_timeouts(seconds: int) -> None:
    """Set the timeout of every process group of this rank, except the groups that work in the background.

    ``ProcessGroup.set_timeout`` is undocumented (torch 2.11 to 2.15; checked with gloo).
    """
    for group in process_groups():
        backends = {entry.partition(":")[2] for entry in dist.get_backend_config(group).split(",")}
        if backends <= SETTABLE and group.group_desc != BACKGROUND:
            group.set_timeout(timedelta(seconds=seconds))
