"""Refuses averages of nothing, and settings without which muP transfers nothing. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from titan_core.api import JobContext, OptimizerSection, Problem
from titan_core.api.config.sections import TrainingSection, ValidationSection
from titan_optim.config import AVERAGED, DECAY, MUP_OPTIMIZER, AveragesSection, MuPSection


def check_averages(context: JobContext[AveragesSection]) -> Iterator[Problem]:
    """Yield a problem for each key that would have no effect."""
    section, steps = context.section, context.job.section(TrainingSection).steps
    if section.start_step > steps:
        why = f"is after the last step, training.steps = {steps}: nothing would be averaged"
        yield Problem(f"averages.start_step = {section.start_step}", why, f"set it to {steps} at most")
    sets = context.job.section(ValidationSection).sets
    if section.validate_averages and sets is not None and AVERAGED in {one.name for one in sets}:
        why = f"a set has the name {AVERAGED!r}, under which the loss of averages is logged"
        yield Problem("validation.sets", why, "give it another name, or set averages.validate_averages = false")
    if section.kind == "mean" and section.decay != DECAY:
        why = 'has no effect on averages.kind = "mean", in which all states have the same weight'
        yield Problem(f"averages.decay = {section.decay}", why, 'remove it, or set averages.kind = "exponential"')
    if section.enable_cpu_offload and context.job.section(TrainingSection).enable_cpu_offload:
        why = "has no effect with training.enable_cpu_offload: the weights, and so their averages, are on the host already"
        yield Problem("averages.enable_cpu_offload = true", why, "remove it")


def check_mup(context: JobContext[MuPSection]) -> Iterator[Problem]:
    """Yield a problem for each setting that contradicts the rules."""
    config = context.job.config
    if (name := context.job.section(OptimizerSection).name) != MUP_OPTIMIZER:
        why = f"the learning rates of widths need optimizer.name = {MUP_OPTIMIZER!r}, not {name!r}"
        yield config.problem("mup.base", why, f"set optimizer.name = {MUP_OPTIMIZER!r}, or remove mup.base")
    tied = context.job.model.layout.tied
    if tied:
        why = f"{next(iter(tied))} is tied to {next(iter(tied.values()))}, and one weight cannot follow the rules of both"
        yield config.problem("mup.base", why, "untie them (for most models: --model.args.tie_embeddings false)")
