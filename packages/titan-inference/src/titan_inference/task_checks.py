"""Checks of ``[evaluation]``. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Final

from titan_core.api import JobContext, Problem
from titan_inference.config import EvaluationSection

LM_EVAL: Final = "lm-eval>=0.4.9"
"""The requirement of the extra ``lm-eval``. An error that named the extra would send its reader to the public index, where
titan-inference is not Titan's."""


def check(context: JobContext[EvaluationSection]) -> Iterator[Problem]:
    """Check that there are tasks, and that the job can run them."""
    section, job = context.section, context.job
    if not section.tasks and not section.final_tasks:
        yield job.config.problem("evaluation.tasks", "names no task", 'set it, for example to ["lambada_openai"]')
    elif find_spec("lm_eval") is None:
        fix = f"install it: `uv pip install '{LM_EVAL}'`"
        yield Problem(job.config.where("evaluation.enable"), "needs the package lm-eval, which is not installed", fix)
    if job.model.layout.inputs:
        why = f"the model takes more than tokens ({', '.join(job.model.layout.inputs)}), which tasks do not give it"
        yield job.config.problem("evaluation.enable", why, "set it to false")
    if job.mesh.diverging_replicas > 1:
        why = f"the job trains {job.mesh.diverging_replicas} replicas that diverge, which are not one model"
        yield job.config.problem("evaluation.enable", why, "set it to false, and use `titan eval` on a checkpoint")
