"""``titan compare``: trains variants of a recipe and compares them side by side."""

from __future__ import annotations

import argparse
import csv
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from titan_core.api import CommandContext, Problem, UserError
from titan_core.api.config.resolved import Override
from titan_core.api.config.sections import JobSection, TrainingSection
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.arguments import process_count, recipe_arguments, small_integer, step_count
from titan_core.toolkit.folder_lock import FolderLock
from titan_core.toolkit.runs.child_runs import ChildRun, without_checkpoints
from titan_core.toolkit.runs.run_log import RunLog
from titan_core.toolkit.text import describe_model, print_table, say
from titan_report.compare.outcome import (
    HEADERS,
    SPEED_STEPS,
    Purpose,
    VariantOutcome,
    csv_rows_of,
    outcome_of,
    purpose_of,
    rows_of,
)
from titan_report.compare.variants import Variant, folders_of, variants_of
from titan_report.page import write_report
from titan_report.shown import Table, distinct_names

WINDOWS = 8
"""Number of speed measurements of a run that compares speed."""
LOSSES = 100
"""Number of losses to log of a run that compares losses."""

_SINGLE: dict[Purpose, str] = {
    "speed": "Each variant ran once, so the noise is only that within a run: --rounds 3 measures it between runs.",
    "loss": "Each variant ran once: --rounds 3 trains each with three seeds, to tell differences from noise.",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan compare``."""
    recipe_arguments(parser)
    parser.add_argument(
        "--vary", action="append", default=[], metavar="SECTION.KEY=A,B",
        help="train with each value; repeat the option to train with every combination",
    )  # fmt: skip
    parser.add_argument(
        "--variant", action="append", default=[], metavar="'SECTION.KEY=A ...'",
        help="add a variant to the unchanged recipe (or to those of --vary); may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--measure", choices=("speed", "loss"),
        help="what to compare (default: loss if the variants differ in a key that changes what is learned, such as a "
             "learning rate)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=step_count, metavar="N",
        help=f"steps of each run (default: {SPEED_STEPS} to compare speed, all of the recipe's to compare losses)",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=small_integer, default=1, metavar="N",
        help="run every variant N times, in turns and in alternating order, so that other load on the machine affects all "
             "variants alike; to compare losses, with seeds training.seed, training.seed + 1, ... (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--nproc-per-node", type=process_count, default=1, metavar="N", help="processes of each run (default: 1)"
    )
    parser.add_argument(
        "--output", metavar="DIR", help="folder of the runs, the table and the report (default: outputs/compare/<recipe>)"
    )


@dataclass
class _Entry:
    """A variant with its finished runs, and the error that ended one of them, if any."""

    variant: Variant
    finished: list[RunLog] = field(default_factory=list)
    failure: UserError | None = None

    def outcome(self, steps: int) -> VariantOutcome | None:
        """Summarise the runs without the first quarter of their steps; ``None`` if the variant failed."""
        return outcome_of(self.finished, steps // 4) if self.finished and self.failure is None else None


def run(context: CommandContext) -> int:
    """Train, print the table, and write it as CSV and in a report. Return exit status 1 if a variant failed."""
    arguments = context.arguments
    entries = [_Entry(variant) for variant in variants_of(arguments.vary, arguments.variant)]
    keys = {override.key for entry in entries for override in entry.variant.overrides}
    arguments.measure = arguments.measure or purpose_of(keys, context.registry)
    jobs = [_job(context, entry.variant) for entry in entries]  # report all mistakes before anything is trained
    requested = [] if arguments.measure == "loss" else [SPEED_STEPS]
    requested = [arguments.steps] if arguments.steps is not None else requested
    arguments.steps = min(*requested, *(job.config.section(TrainingSection).steps for job in jobs))
    # The same seed would give the same losses.
    arguments.seeds = arguments.measure == "loss" and "training.seed" not in keys
    folder = Path(arguments.output or Path("outputs", "compare", Path(jobs[0].config.section(JobSection).dump_folder).name))
    with FolderLock(folder, f"--output {folder}"):
        return _compare(context, entries, jobs, folder)


def _compare(context: CommandContext, entries: list[_Entry], jobs: list[AssembledJob], folder: Path) -> int:
    arguments = context.arguments
    if arguments.measure == "loss":
        say(f"comparing losses after {arguments.steps} steps (--measure speed: only speed, after {SPEED_STEPS})")
    for number, folders in enumerate(folders_of([entry.variant for entry in entries], folder, arguments.rounds)):
        turn = list(zip(entries, jobs, folders, strict=True))
        for entry, job, place in reversed(turn) if number % 2 else turn:
            if entry.failure is None:
                _train(context, entry, job, place, number)
    outcomes = [(entry.variant.name, entry.outcome(arguments.steps)) for entry in entries]
    rows = rows_of(outcomes, arguments.measure)
    print()
    print_table(HEADERS[arguments.measure], rows)
    if arguments.rounds == 1:
        say(f"\n{_SINGLE[arguments.measure]}")
    _write(folder, csv_rows_of(outcomes))
    table = Table(_title(arguments, jobs[0]), HEADERS[arguments.measure], tuple(rows))
    _report(folder, table, entries)
    for entry in entries:
        if entry.failure is not None:
            say(f"\n{entry.variant.name}: {entry.failure}", file=sys.stderr)
    return int(any(entry.failure is not None for entry in entries))


def _job(context: CommandContext, variant: Variant) -> AssembledJob:
    try:
        return context.job(context.arguments.nproc_per_node, variant.overrides)
    except UserError as error:
        problems = (Problem(f"variant {variant.name!r}: {each.where}", each.why, each.fix) for each in error.problems)
        raise UserError(*problems) from None


def _train(context: CommandContext, entry: _Entry, job: AssembledJob, place: Path, number: int) -> None:
    """Train a variant in round ``number``, counted from 0."""
    arguments = context.arguments
    windows = WINDOWS if arguments.measure == "speed" else LOSSES
    settings = {"training.stop_at_step": arguments.steps, "metrics.log_freq": max(1, arguments.steps // windows)}
    if arguments.seeds and number:
        settings["training.seed"] = job.config.section(TrainingSection).seed + number
    observed = [*(Override(key, str(value)) for key, value in settings.items()), *without_checkpoints(job)]
    overrides = [*context.overrides, *observed, *entry.variant.overrides]
    say(f"{entry.variant.name}: {arguments.steps} steps, in {place}", flush=True)
    try:
        ChildRun(arguments.recipe, overrides, arguments.nproc_per_node, place).train()
        log = RunLog.read(place)
        if any(event["step"] for event in log.events if event["event"] == "start"):
            why = "resumed from a checkpoint of an earlier run"
            raise UserError.one(f"run {str(place)!r}", why, "set a checkpoint folder below job.dump_folder, or none")
    except UserError as error:  # still compare the other variants
        entry.failure = error
        return
    entry.finished.append(log)


def _title(arguments: argparse.Namespace, job: AssembledJob) -> str:
    model = describe_model(job.name, job.model.num_params, job.model.num_active_params)
    rounds = f", {arguments.rounds} {'seeds' if arguments.seeds else 'rounds'}" if arguments.rounds > 1 else ""
    return f"{model}: {arguments.steps} steps on {arguments.nproc_per_node} process(es){rounds}"


def _write(folder: Path, rows: list[tuple[object, ...]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    comparison = folder / "comparison.csv"
    with comparison.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    say(f"\nthe table is in {comparison}")


def _report(folder: Path, table: Table, entries: list[_Entry]) -> None:
    """Write the report of each variant's last run, with the table on top."""
    runs = {number: entry.finished[-1] for number, entry in enumerate(entries) if entry.finished}
    if not runs:
        return
    # The names of the runs on the page, so that each row gets the colour of its run.
    names = dict(zip(runs, distinct_names([run.path for run in runs.values()]), strict=True))
    named = tuple((names.get(number, row[0]), *row[1:]) for number, row in enumerate(table.rows))
    page = folder / "report.html"
    try:
        write_report(list(runs.values()), page, replace(table, rows=named))
    except UserError as error:
        say(f"no report: {error}", file=sys.stderr)
        return
    say(f"the report is in {page}")
