"""Prints and writes what ``titan plan`` has found for one machine and number of GPUs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from titan_core.api import CommandContext, Config, UserError
from titan_core.api.config.resolved import Override
from titan_core.api.config.secrets import redact
from titan_core.api.config.sections import JobSection
from titan_core.toolkit.errors import EXIT_INTERRUPTED
from titan_core.toolkit.text import print_json, say
from titan_simulate.cli.plan_model import to_fill_in
from titan_simulate.cli.planned import as_json, compared, print_plan, proved, summary, unfinished
from titan_simulate.cli.planned_stage import PlannedStage
from titan_simulate.cli.run_length import RunLength
from titan_simulate.hardware.machine import HEADROOM, Machine
from titan_simulate.plan.result import INTERRUPTED, Plan


def conclude(
    context: CommandContext,
    plan: Plan,
    machine: Machine,
    stage: PlannedStage | None = None,
    price: float | None = None,
    notes: Sequence[str] = (),
) -> int:
    """Print ``plan``, write the recipe of its winner, and return the exit status. A comparison that was not finished has no
    winner.

    Args:
        price: of a device for an hour, if it is known.
        notes: what to print above the plan.
    """
    options, best = context.arguments, plan.winner
    length = None
    if options.tokens is not None and plan.best:
        length = RunLength.of(options.tokens, plan.best[0].figures, options.gpus, price)
    if options.out is not None and best is not None:
        text = f"{compared(plan)}; {proved(plan)}. The best: {summary(best)}"
        later = stage is not None and stage.number > 0
        steps = () if length is None else (Override("training.steps", str(length.steps)),)
        config = context.config(() if later else [*best.candidate.overrides, *steps])
        config = stage.config(config, best.candidate.values) if stage is not None and later else config
        text += "" if options.model is None else f"\n{to_fill_in(context)}"
        write_recipe(Path(options.out), config, _command(context), text)
    if options.json:
        of_stage = {} if stage is None else {"stage": stage.as_json()}
        run = {} if length is None else {"run": length.as_json(options.budget_hours)}
        print_json({**of_stage, **run, **as_json(plan, machine, options.best)})
    else:
        if stage is not None:
            say(stage.describe())
        for note in notes:
            say(note)
        print_plan(plan, machine, options.best)
        if length is not None:
            say(f"\n{length.describe(options.tokens, options.budget_hours)}")
        if plan.stopped is not None:
            say(f"\n{unfinished(plan, options.out)}")
        elif options.out is not None and best is not None:
            say(f"\nwrote {options.out}")
    if plan.stopped == INTERRUPTED:
        return EXIT_INTERRUPTED
    return 1 if best is None else 0


def write_recipe(path: Path, config: Config, command: str, summary: str) -> None:
    """Write ``config`` to the new file ``path``: its stages, and the keys that the recipe, command line and plan set.

    Raises:
        UserError: the file exists, or cannot be written.
    """
    stages = {"stages": [dict(stage.table) for stage in config.stages]} if config.stages else {}
    comment = "".join(f"# {line}\n" for line in f"Planned by `{command}`\n{summary}".splitlines())
    text = f"{comment}\n{tomli_w.dumps(redact({**tables_of(config), **stages}))}"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError.one(f"--out {path}", f"cannot be written: {error.strerror}", "name a new file") from None


def tables_of(config: Config) -> dict[str, dict[str, Any]]:
    """Return the keys of ``config`` that are set, by section. The run directory follows from the new file's name, unless the
    command line sets it."""
    tables: dict[str, dict[str, Any]] = {}
    for cls, section in config.sections.items():
        found = section.model_dump(exclude_unset=True, exclude_none=True)
        if cls is JobSection and "job.dump_folder" not in config.overridden:
            found.pop("dump_folder", None)
        if found:
            tables.setdefault(cls.section, {}).update(found)
    return tables


def _command(context: CommandContext) -> str:
    options = context.arguments
    recipe = options.recipe if options.model is None else f"--model {shlex.quote(options.model)} --seq-len {options.seq_len}"
    headroom = "" if options.headroom == HEADROOM else f" --headroom {options.headroom:g}"
    headroom += "" if options.stage is None else f" --stage {shlex.quote(options.stage)}"
    headroom += "" if options.expert_imbalance == 1.0 else f" --expert-imbalance {options.expert_imbalance:g}"
    headroom += "" if options.tokens is None else f" --tokens {options.tokens}"
    overrides = "".join(f" {argument}" for argument in context.override_arguments)
    device = "".join(f" --device {shlex.quote(name)}" for name in options.device or ())
    return f"titan plan {recipe} --gpus {options.gpus}{device}{headroom}{overrides}"
