"""The stages of a run, each with its estimate. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_core.api import UserError, matches
from titan_core.api.plugins.assembled_job import AssembledJob

if TYPE_CHECKING:
    from titan_simulate.estimate.estimate import Estimate

SAME_STEP = ("lr_scheduler.*", "optimizer.lr", "data.mixture", "training.dataset*")
"""Keys that change neither the memory nor the time of a simulated step, which reads random documents."""


@dataclass(frozen=True)
class StageEstimate:
    """A stage and what a step of it needs."""

    name: str
    first_step: int
    """The step after which it begins."""
    end_step: int
    """Its last step."""
    tokens: int
    """That it reads, padding included."""
    seconds: float
    """Of all its steps."""
    estimate: Estimate
    simulated_as: str
    """Name of the first stage that has the same step, of which the figures are: often its own."""


def estimate_stages(
    stages: Sequence[AssembledJob], estimated: Callable[[AssembledJob, str], Estimate]
) -> list[StageEstimate]:  # fmt: skip
    """Estimate the stages of a run that have steps. Those whose steps need the same are simulated once.

    Args:
        stages: the jobs of all stages.
        estimated: estimates the job of a stage, and receives ``"stage 2 of 3"`` to report.
    """
    simulated = simulated_as(stages)
    distinct = list(dict.fromkeys(simulated.values()))
    figures = {
        number: estimated(stages[number], f"stage {stages[number].stages[number].name!r} ({place} of {len(distinct)})")
        for place, number in enumerate(distinct, 1)
    }
    found = []
    for number, of in simulated.items():
        job, estimate = stages[number], figures[of]
        found.append(
            StageEstimate(
                name=job.stages[number].name,
                first_step=job.first_step,
                end_step=job.end_step,
                tokens=job.tokens_before(job.end_step) - job.tokens_before(job.first_step),
                seconds=(job.end_step - job.first_step) * estimate.step_seconds,
                estimate=estimate,
                simulated_as=job.stages[of].name,
            )
        )
    return found


def simulated_as(stages: Sequence[AssembledJob]) -> dict[int, int]:
    """Return number -> number of the first stage with the same step, of each stage that has steps."""
    first: dict[str, int] = {}
    return {
        number: first.setdefault(step_of(job), number)
        for number, job in enumerate(stages)
        if job.first_step < job.end_step
    }  # fmt: skip


def number_of_stage(job: AssembledJob, name: str) -> int:
    """Return the number of the stage of ``job`` that is called ``name``.

    Raises:
        UserError: there is no such stage.
    """
    names = [stage.name for stage in job.stages]
    if name not in names:
        why = f"the run has the stages {', '.join(map(repr, names))}" if names else "the recipe has no [[stages]]"
        raise UserError.one(
            f"--stage {name}", f"no stage is called so: {why}", "name one of them" if names else "leave it out"
        )
    return names.index(name)


def step_of(job: AssembledJob) -> str:
    """Return what a simulated step of a job depends on, to compare it with that of another stage."""
    return json.dumps(dict(_keys(job)), sort_keys=True, default=str)


def _keys(job: AssembledJob) -> Iterator[tuple[str, object]]:
    for section, values in job.config.as_dict().items():
        for key, value in values.items():
            if not matches(f"{section}.{key}", SAME_STEP):
                yield f"{section}.{key}", value
