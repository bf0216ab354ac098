"""The numbers of machines that an elastic job can train on, and what the machines of a round do. Free of torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from titan_core.api import UserError
from titan_core.api.config.resolved import Override
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.text import spans

CHECK_SECONDS = 10.0
"""Longest time for checking the sizes of a range before the start. Others are checked when they occur."""


@dataclass(frozen=True)
class Plan:
    """What the machines of a round do."""

    machines: int
    """Number of machines that train, the first ones; the others idle. 0 if the job cannot train on them."""
    ranks: int
    batch: int = 0
    """Global batch size, in sequences."""
    accumulation: int = 0
    mesh: str = ""
    why: str = ""
    """Why not all machines train; empty if they do."""

    def __str__(self) -> str:
        steps = "no gradient accumulation" if self.accumulation == 1 else f"{self.accumulation} accumulation steps"
        return f"{self.ranks} ranks ({self.mesh}), {steps}, global batch {self.batch}"


@dataclass
class Sizes:
    """The numbers of ranks that a job can train on."""

    assemble: Callable[[int, Sequence[Override]], AssembledJob]
    """Assembles the job for a number of ranks, with more overrides."""
    _found: dict[tuple[int, int], AssembledJob | UserError] = field(default_factory=dict)

    def on(self, ranks: int, batch: int = 0) -> AssembledJob | UserError:
        """Return the job on ``ranks`` ranks, or why it cannot train there.

        Args:
            batch: the global batch to keep; 0 for that of the recipe or of the run's directory.
        """
        if (ranks, batch) not in self._found:
            try:
                self._found[ranks, batch] = self.assemble(ranks, overrides(batch))
            except UserError as error:
                self._found[ranks, batch] = error
        return self._found[ranks, batch]

    def check(self, per_node: int, machines: tuple[int, int]) -> tuple[AssembledJob, str]:
        """Return the job on the most machines that can train it, and a line that says which numbers of them can.

        Raises:
            UserError: none can.
        """
        least, most = machines
        largest = self.on(most * per_node)
        # If the recipe leaves the global batch open, that of the first start counts: here, of all machines.
        batch = largest.batch.global_size if isinstance(largest, AssembledJob) else 0
        able: list[int] = []
        unable: dict[int, UserError] = {}
        jobs: list[AssembledJob] = []
        until = time.monotonic() + CHECK_SECONDS
        unchecked = 0
        for number in range(most, least - 1, -1):
            if number < most and time.monotonic() > until:
                unchecked = number - least + 1
                break
            found = self.on(number * per_node, batch)
            if isinstance(found, AssembledJob):
                able.append(number)
                jobs.append(found)
            else:
                unable[number] = found
        if not jobs:
            raise next(iter(unable.values()))
        size = jobs[0].batch.global_size
        line = f"elastic job: {spans(able)} machine(s) of {per_node} rank(s) can train with a global batch of {size}"
        if unable:
            number, error = min(unable.items())
            why = f"{number} machine(s): " if len(unable) > 1 else ""
            line += f"; {spans(unable)} cannot ({why}{error.problems[0]})"
        if unchecked:
            line += f"; {unchecked} smaller sizes are checked when they occur"
        return jobs[0], line


def overrides(batch: int) -> list[Override]:
    """Return what makes a recipe elastic, with the global batch to keep if it is known."""
    found = [Override("training.elastic", "true")]
    return [*found, Override("training.global_batch_size", str(batch))] if batch else found


def choose(sizes: Sizes, counts: Sequence[int], least: int, batch: int) -> Plan:
    """Return the plan for machines with ``counts`` ranks: as many of them as can train, and at least ``least``."""
    why = ""
    for machines in range(len(counts), least - 1, -1):
        ranks = sum(counts[:machines])
        found = sizes.on(ranks, batch)
        if isinstance(found, AssembledJob):
            plan = found.batch
            return Plan(machines, ranks, plan.global_size, plan.microbatches, str(found.mesh), why)
        why = why or f"{ranks} rank(s) cannot train: {found.problems[0]}"
    return Plan(0, sum(counts), why=why)
