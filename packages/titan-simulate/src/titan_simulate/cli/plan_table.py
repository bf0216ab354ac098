"""The table of ``titan plan``: the best candidates on several machines and numbers of GPUs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from titan_core.api import UserError
from titan_core.toolkit.errors import EXIT_FAILURE, EXIT_INTERRUPTED
from titan_core.toolkit.text import print_json, print_table, say
from titan_simulate.cli.plan_inputs import Device
from titan_simulate.cli.planned import as_json
from titan_simulate.cli.run_length import RunLength, show_amount
from titan_simulate.plan.result import INTERRUPTED, Finalist, Plan

KNEE: Final = 0.4
"""Share of the time that twice the GPUs must save. Half is the most that they can without a faster GPU."""

SearchOf = Callable[[int, Device], Plan]
"""(number of GPUs, device) -> the plan. Raises UserError if there is no mesh."""


@dataclass(frozen=True)
class PlannedRow:
    """The plan on one number of GPUs."""

    device: Device
    gpus: int
    plan: Plan | None
    """``None``: there is none."""
    refusal: str = ""
    """Why there is none."""

    @property
    def best(self) -> Finalist | None:
        """The fastest candidate so far."""
        return self.plan.best[0] if self.plan is not None and self.plan.best else None

    @property
    def complete(self) -> bool:
        """Whether all finalists were estimated."""
        return self.plan is None or self.plan.stopped is None

    def run(self, tokens: int) -> RunLength | None:
        """The run of ``tokens`` tokens with the best candidate."""
        return None if self.best is None else RunLength.of(tokens, self.best.figures, self.gpus, self.device.price)


def rows_of(devices: Sequence[Device], numbers: Sequence[int], least_gib: float, search: SearchOf) -> list[PlannedRow]:
    """Plan each number of GPUs on each device, the largest first, until one does not fit. An interrupt ends the rows.

    Args:
        least_gib: memory of all devices together without which the job cannot fit.

    Raises:
        UserError: there is no mesh on any of them.
    """
    rows: list[PlannedRow] = []
    refusals: list[UserError] = []
    for device in devices:
        for gpus in sorted(numbers, reverse=True):
            if gpus * device.machine.memory_gib < least_gib and gpus != max(numbers):
                break
            try:
                row = PlannedRow(device, gpus, search(gpus, device))
            except UserError as error:
                refusals.append(error)
                row = PlannedRow(device, gpus, None, error.problems[0].why)
            except KeyboardInterrupt:
                row = PlannedRow(device, gpus, Plan(0, stopped=INTERRUPTED))
            rows.append(row)
            if row.plan is not None and row.plan.stopped == INTERRUPTED:
                return rows
            if row.plan is not None and row.complete and row.best is None:
                break
    if len(refusals) == len(rows):
        raise refusals[0]
    return rows


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4 ... up to ``most``."""
    return [2**power for power in range(most.bit_length())]


def knee_of(rows: Sequence[PlannedRow]) -> PlannedRow | None:
    """Return the first of ``rows``, those of one device in ascending order, of which twice the GPUs save less than
    :data:`KNEE` of the time. ``None`` if all save more, or a row before it is not complete."""
    for row, doubled in pairwise(row for row in rows if row.best is not None or not row.complete):
        before, after = row.plan and row.plan.winner, doubled.plan and doubled.plan.winner
        if not before or not after:
            return None
        speeds = [one.figures.tokens_per_second_per_gpu * gpus for one, gpus in ((before, row.gpus), (after, doubled.gpus))]
        if doubled.gpus == 2 * row.gpus and 1 - speeds[0] / speeds[1] < KNEE:
            return row
    return None


def conclude_table(rows: Sequence[PlannedRow], options: argparse.Namespace, notes: Sequence[str]) -> int:
    """Print the rows, by device and number of GPUs, and return the exit status: 1 if none fits."""
    by_device: dict[str, list[PlannedRow]] = {}
    for row in sorted(rows, key=lambda row: row.gpus):
        by_device.setdefault(row.device.name, []).append(row)
    ordered = [row for name in dict.fromkeys(row.device.name for row in rows) for row in by_device[name]]
    knees = {id(knee) for of_device in by_device.values() if (knee := knee_of(of_device)) is not None}
    stopped = [row.plan.stopped for row in rows if row.plan is not None and row.plan.stopped is not None]
    if options.json:
        print_json(_as_json(ordered, knees, options, not stopped))
    else:
        _print(ordered, knees, options, notes)
    if stopped:
        return EXIT_INTERRUPTED
    return 0 if any(row.best for row in rows) else EXIT_FAILURE


def _as_json(rows: Sequence[PlannedRow], knees: set[int], options: argparse.Namespace, complete: bool) -> Mapping[str, Any]:
    def of_row(row: PlannedRow) -> Mapping[str, Any]:
        run = None if options.tokens is None else row.run(options.tokens)
        return {
            "name": row.device.name,
            "gpus": row.gpus,
            "knee": id(row) in knees,
            "run": None if run is None else run.as_json(options.budget_hours),
            "refusal": row.refusal or None,
            **({} if row.plan is None else as_json(row.plan, row.device.machine, options.best)),
        }

    return {"tokens": options.tokens, "knee_saves_less_than": KNEE, "complete": complete, "rows": list(map(of_row, rows))}


def _print(rows: Sequence[PlannedRow], knees: set[int], options: argparse.Namespace, notes: Sequence[str]) -> None:
    if model := next((row.plan.model for row in rows if row.plan is not None and row.plan.model), ""):
        say(model)
    for note in notes:
        say(note)
    priced = any(row.device.price is not None for row in rows)
    lengths = [] if options.tokens is None else ["days", "GPU-hours", *(["price"] if priced else [])]
    print()
    print_table(
        ("device", "GPUs", "GiB", "tokens/s/GPU", "MFU", *lengths, "mesh", ""),
        [_cells(row, id(row) in knees, options, priced) for row in rows],
    )
    if knees:
        say(f"\nknee: from there on, twice the GPUs save less than {KNEE:.0%} of the time")
    elif all(row.complete for row in rows):
        say(f"\nno knee: wherever the table has twice the GPUs, they save {KNEE:.0%} of the time or more")
    if not all(row.complete for row in rows):
        say("\nNOT COMPLETE: faster candidates may be among those that were not estimated")


def _cells(row: PlannedRow, knee: bool, options: argparse.Namespace, priced: bool) -> tuple[str, ...]:
    run = None if options.tokens is None else row.run(options.tokens)
    lengths = ["-"] * (0 if options.tokens is None else 2 + priced)
    if run is not None:
        price = "-" if run.price is None else show_amount(run.price)
        lengths = [show_amount(run.days), show_amount(run.gpu_hours), *([price] if priced else [])]
    remarks = ["knee"] if knee else []
    if run is not None and options.budget_hours is not None and run.gpu_hours <= options.budget_hours:
        remarks.append("within the budget")
    if row.plan is not None and row.plan.stopped is not None:
        remarks.append(f"NOT COMPLETE ({row.plan.stopped})")
    if row.best is None:
        remarks += [row.refusal] if row.plan is None else ["nothing fits"] if row.complete else []
        figures = ["-"] * 3
        mesh = "-"
    else:
        found = row.best.figures
        figures = [f"{found.peak_gib:.1f}", f"{found.tokens_per_second_per_gpu:,.0f}", f"{found.mfu:.1%}"]
        mesh = str(row.best.candidate.mesh)
    return (row.device.name, f"{row.gpus:,}", *figures, *lengths, mesh, "; ".join(remarks))
