"""What a chaos run found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any


@dataclass
class Struck:
    """One fault, and how the job recovered."""

    kind: str
    trigger: str
    """The event that it followed."""
    step: int
    """The last step that the job had reported."""
    detail: str = ""
    resumed: int = 0
    """The step after which the first attempt after the fault resumed."""
    lost: int = 0
    """Number of steps that were trained again."""
    first_step: float = 0.0
    """Seconds from the fault to the next completed step."""
    whole: float = 0.0
    """Seconds from the fault until all ranks trained again, and checkpoints were saved again."""
    attempts: int = 0
    """How often the ranks were started."""


@dataclass
class Report:
    """The result of a chaos run."""

    seed: int
    steps: int
    ranks: int
    faults: list[Struck] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Why the run failed; empty if the disturbed job is equal to the undisturbed one."""
    largest_difference: float | None = None
    """Largest relative difference between the losses of a step; ``None`` if they were not compared."""
    compared_steps: int = 0
    exits: dict[str, int] = field(default_factory=dict)
    """How often an agent ended with each status."""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-compatible values."""
        return {**asdict(self), "passed": not self.problems}


HEAD = f"{'':>3} {'fault':<15} {'after':<11} {'step':>5} {'from':>5} {'lost':>5} {'next step':>10} {'whole':>8}  what"


def row(number: int, fault: Struck) -> str:
    """Return the line of a fault."""
    return (
        f"{number:>3} {fault.kind:<15} {fault.trigger:<11} {fault.step:>5} {fault.resumed:>5} {fault.lost:>5} "
        f"{fault.first_step:>8.1f} s {fault.whole:>6.1f} s  {fault.detail}"
    )


def show(report: Report) -> str:
    """Return the totals by kind and the verdict."""
    lines = [
        "",
        f"{'fault':<15} {'times':>5} {'lost':>5} {'next step, median':>18} {'most':>8} {'whole, median':>14} {'most':>8}",
    ]
    for kind in sorted({fault.kind for fault in report.faults}):
        of_kind = [fault for fault in report.faults if fault.kind == kind]
        first, whole = [fault.first_step for fault in of_kind], [fault.whole for fault in of_kind]
        lines.append(
            f"{kind:<15} {len(of_kind):>5} {sum(fault.lost for fault in of_kind):>5} {median(first):>16.1f} s "
            f"{max(first):>6.1f} s {median(whole):>12.1f} s {max(whole):>6.1f} s"
        )
    lost, starts = sum(fault.lost for fault in report.faults), sum(fault.attempts for fault in report.faults)
    lines += [
        "",
        f"{len(report.faults)} faults, {starts} restarts, {lost} steps trained again, {report.seconds / 60:.1f} minutes",
    ]
    lines += report.notes
    if report.largest_difference is not None:
        difference = report.largest_difference
        lines.append(f"losses of {report.compared_steps} steps differ by at most {difference:.1e} (relative)")
    if report.problems:
        return "\n".join([*lines, *(f"FAILED: {problem}" for problem in report.problems)])
    return "\n".join([*lines, f"passed: the tokens of all {report.steps} steps are those of the undisturbed job"])
