"""What a job trained on: reads what the plugin in ``site/`` recorded, and compares it with another run."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from benchmarks.chaos.site.titan_chaos import TRAIL
from titan_core.toolkit.json_lines import read_lines


@dataclass
class Attempt:
    """One start of the job, until it ended or was killed."""

    time: float
    """When it began, in seconds since the epoch."""
    begun: int
    """The step that it resumed after."""
    world: int
    """Number of ranks."""
    rows: dict[int, dict[int, str]] = field(default_factory=dict)
    """By step: digest of each sequence of the global batch."""
    ended: dict[int, float] = field(default_factory=dict)
    """By step: when the last rank had completed it."""
    doubled: list[str] = field(default_factory=list)
    """Sequences that more than one rank trained on."""

    def complete(self, batch: int) -> list[int]:
        """Return the steps that all ranks completed, in order.

        Args:
            batch: number of sequences in the global batch.
        """
        return sorted(step for step, rows in self.rows.items() if len(rows) == batch)


def attempts_in(folder: Path) -> list[Attempt]:
    """Return the attempts recorded in ``folder``, in order."""
    found: dict[str, Attempt] = {}
    for file in sorted((folder / TRAIL).glob("*.jsonl")):
        name = file.stem.rpartition("-")[0]
        first, *steps = read_lines(file) or [None]
        if first is None:  # killed before its first line
            continue
        attempt = found.setdefault(name, Attempt(float(name), first["begun"], first["world"]))
        for record in steps:
            step = record["step"]
            rows = attempt.rows.setdefault(step, {})
            for row, digest in record["rows"].items():
                if int(row) in rows:
                    attempt.doubled.append(f"step {step}: two ranks trained on row {row} of the batch")
                rows[int(row)] = digest
            attempt.ended[step] = max(attempt.ended.get(step, 0.0), record["time"])
    return sorted(found.values(), key=lambda attempt: attempt.time)


def lost_steps(attempts: list[Attempt], batch: int, since: float, until: float = float("inf")) -> int:
    """Return the number of steps that attempts begun between two times had to train again."""
    lost, done = 0, 0
    for attempt in attempts:
        if since < attempt.time <= until:
            lost += max(0, done - attempt.begun)
        done = max([attempt.begun, *attempt.complete(batch)])
    return lost


def trajectory(attempts: list[Attempt], batch: int) -> tuple[dict[int, dict[int, str]], list[str]]:
    """Return the rows of each step that led to the job's final weights, and what is wrong with them.

    A resumed attempt abandons the steps after the checkpoint that it resumes from.
    """
    final: dict[int, dict[int, str]] = {}
    problems = [problem for attempt in attempts for problem in attempt.doubled]
    for before, after in pairwise(attempts):
        late = [step for step, ended in before.ended.items() if ended > after.time]
        if late:
            problems.append(f"step {late[0]}: an earlier attempt still trained when the next one had begun")
    for attempt in attempts:
        if attempt.begun > len(final):
            problems.append(f"an attempt resumed after step {attempt.begun}, but only {len(final)} were trained")
        final = {step: rows for step, rows in final.items() if step <= attempt.begun}
        steps = attempt.complete(batch)
        if steps != list(range(attempt.begun + 1, attempt.begun + 1 + len(steps))):
            problems.append(f"an attempt that resumed after step {attempt.begun} trained the steps {steps}")
        final |= {step: attempt.rows[step] for step in steps}
    return final, problems


def differences(final: dict[int, dict[int, str]], expected: dict[int, dict[int, str]]) -> list[str]:
    """Return how the tokens of a job differ from those that are expected."""
    found = []
    for step in sorted(final.keys() | expected.keys()):
        if step not in final:
            found.append(f"step {step} was not trained")
        elif step not in expected:
            found.append(f"step {step} was trained, but does not belong to the job")
        elif final[step] != expected[step]:
            rows = [row for row in sorted(expected[step]) if final[step].get(row) != expected[step][row]]
            found.append(f"step {step} trained on other tokens in the rows {rows} of the batch")
    return found
