"""Components of titan-inference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan_core.api import Checkpoint, Command, Observer, Ref, hookimpl
from titan_inference.config import EvaluationSection, SampleSection

if TYPE_CHECKING:
    from titan_core.api import RunEnd
    from titan_core.api.observe.events import NextCommand
    from titan_core.api.plugins.assembled_job import AssembledJob

api = (1, 0)

PROMPT = "Once upon a time"
"""Prompt to suggest if the run has none of its own."""


@hookimpl
def titan_debuggers() -> list[Observer]:
    return [
        Observer(
            name="sample",
            summary="lets the model write at the end of a run, and at intervals",
            config=SampleSection,
            active=lambda context: context.section.enable,
            build=Ref("titan_inference.sample:Sampling"),
        ),
        Observer(
            name="evaluation",
            summary="runs tasks of lm-eval on the model while it trains",
            config=EvaluationSection,
            active=lambda context: context.section.enable,
            build=Ref("titan_inference.task_evaluation:TaskEvaluation"),
            check=Ref("titan_inference.task_checks:check"),
        ),
    ]


@hookimpl
def titan_commands() -> list[Command]:
    return [
        Command(
            name="generate",
            group="data and models",
            summary="continue prompts with a trained model",
            arguments=Ref("titan_inference.cli:arguments"),
            run=Ref("titan_inference.cli:run"),
            overrides=True,
            launches=True,
        ),
        Command(
            name="eval",
            group="data and models",
            summary="measure a trained model: perplexity on a dataset, tasks of lm-eval",
            arguments=Ref("titan_inference.evaluate:arguments"),
            run=Ref("titan_inference.evaluate:run"),
            overrides=True,
            launches=True,
        ),
    ]


@hookimpl(tryfirst=True)
def titan_next_commands(job: AssembledJob, end: RunEnd) -> list[NextCommand]:
    from titan_core.api.observe.events import NextCommand

    readable = isinstance(job.checkpoint, Checkpoint) and job.checkpoint.find_model is not None
    if end.checkpoint is None or not readable or job.mesh.diverging_replicas > 1:  # their weights are not one model
        return []
    prompt = next(filter(None, job.config.section(SampleSection).prompts), PROMPT)
    return [NextCommand("continue a prompt", ("generate", end.checkpoint, "--prompt", prompt))]
