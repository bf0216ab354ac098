"""Trains a small elastic job on this machine, disturbs it with faults, and compares it with the undisturbed job.

Two agents of `titan train --nnodes 1:2` train together. Each fault strikes when the job has reported a step, has saved a
checkpoint or begins to save one; the next one comes after all ranks train again. At the end, every step must have trained on
the same tokens as in an undisturbed run, with the same loss, and no process may be left over.

    uv run python -m benchmarks.chaos --seed 0 [--steps 300] [--faults 50] [--ranks 4] [--kinds kill-rank ...] [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.chaos import disk
from benchmarks.chaos.cluster import ChaosFailure
from benchmarks.chaos.faults import KINDS, draw
from benchmarks.chaos.report import Report, show
from benchmarks.chaos.session import MARGIN, Session, undisturbed


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return exit status 1 if the job did not survive, or differs from the undisturbed one."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="chooses the faults (default: 0)")
    parser.add_argument("--steps", type=int, default=300, help="steps of the job (default: 300)")
    parser.add_argument("--faults", type=int, default=50, help="number of faults (default: 50)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of the job, half of them under each agent (default: 4)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=f"{', '.join(KINDS)}")
    parser.add_argument("--limit", type=float, default=300.0, help="longest wait for a recovery, in seconds (default: 300)")
    parser.add_argument("--folder", type=Path, help="keep what the job writes in this new folder")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and progress on standard error")
    given = parser.parse_args(arguments)
    if given.ranks < 2 or given.ranks % 2:
        parser.error("--ranks must be even: half of them run under each agent")
    if given.steps < (least := 2 * given.faults + MARGIN):
        parser.error(f"--steps must be at least {least} for {given.faults} faults")
    if given.folder is not None and given.folder.exists():
        parser.error(f"--folder {given.folder} exists already")
    folder = Path(tempfile.mkdtemp(prefix="titan-chaos-")) if given.folder is None else given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    report = run(folder, given.seed, given.steps, given.faults, given.ranks, given.kinds, given.limit, quiet=given.json)
    print(json.dumps(report.as_dict(), indent=2) if given.json else show(report))
    if given.folder is None and not report.problems:
        disk.unmount(folder / "disk")
        shutil.rmtree(folder)
    elif report.problems:
        print(f"what the job wrote is in {folder}", file=sys.stderr)
    return int(bool(report.problems))


def run(
    folder: Path, seed: int, steps: int, faults: int, ranks: int, kinds: list[str], limit: float, quiet: bool = False
) -> Report:
    """Train the undisturbed job and the disturbed one in ``folder``, and compare them.

    Args:
        limit: longest wait for a recovery, in seconds.
        quiet: whether to print progress on standard error instead of standard output.
    """
    began = time.time()
    report = Report(seed=seed, steps=steps, ranks=ranks)

    def say(line: str) -> None:
        print(line, flush=True, file=sys.stderr if quiet else sys.stdout)

    chance = random.Random(seed)
    why = disk.mount(folder / "disk")
    if why and "full-disk" in kinds:
        report.notes.append(f"full-disk is left out: {why}")
        kinds = [kind for kind in kinds if kind != "full-disk"]
    overrides = ["--training.steps", str(steps), "--checkpoint.folder"]
    say(f"the undisturbed job: {steps} steps on {ranks} ranks")
    try:
        expected = undisturbed(
            folder / "undisturbed", ranks, [*overrides, str(folder / "undisturbed" / "checkpoint")], limit
        )
        say(f"the disturbed job: {faults} faults by seed {seed}")
        with Session(folder, ranks, [*overrides, str(folder / "disk" / "checkpoint")], limit, report) as session:
            session.disturb(draw(kinds, faults, chance), steps, chance, say)
            session.finish(steps)
            report.problems += session.compare(expected)
    except ChaosFailure as failure:
        report.problems.append(str(failure))
    report.seconds = time.time() - began
    return report


if __name__ == "__main__":
    sys.exit(main())
