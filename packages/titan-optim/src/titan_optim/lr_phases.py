"""Phases of the learning rate: which step is in which phase, and its factor. Free of torch, but for :func:`build`."""

from __future__ import annotations

import logging
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from titan_core.api import JobContext, LRScheduleContext, Problem
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.hookspecs import JobFact
from titan_optim.lr_phases_config import LRPhase, LRPhasesSection

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LambdaLR

log = logging.getLogger(__name__)

TokensBefore = Callable[[int], int]
"""Number of tokens in the first so many steps; it never falls."""


@dataclass(frozen=True)
class Span:
    """A phase of a job. Places and lengths are steps or tokens since the start of training, as the phase's own length."""

    phase: LRPhase
    first: int
    """Number of steps before the phase."""
    end: int | None
    """Number of steps before the next one; ``None`` if training ends in this one."""
    begin: int
    length: int | None
    start: float
    """Factor on the learning rate at ``begin``."""

    def factor(self, place: int) -> float:
        """Return the factor at ``place``."""
        phase, start = self.phase, self.start
        if phase.shape == "constant":
            return start
        if phase.shape == "power" or phase.shape == "inverse_sqrt":
            return start * (place / self.begin) ** -(phase.exponent or 0.5)
        assert self.length is not None and phase.end_factor is not None
        part, change = min(1.0, (place - self.begin) / self.length), phase.end_factor - start
        match phase.shape:
            case "linear":
                return start + change * part
            case "cosine":
                return phase.end_factor - change * (1.0 + math.cos(math.pi * part)) / 2
            case "sqrt":
                return start + change * math.sqrt(part)
            case "polynomial":
                return phase.end_factor - change * (1.0 - part) ** (phase.exponent or 1.0)


def spans_of(phases: Sequence[LRPhase], tokens: TokensBefore, steps: int) -> list[Span]:
    """Return the phases of a training of ``steps`` steps, without those that begin after its end.

    A phase in tokens ends at the first step that begins with all of them behind it. The next one, if in tokens as well,
    counts from where the tokens of this one ended, even within a step, so that the lengths add up.
    """
    spans: list[Span] = []
    first, factor, exact = 0, 1.0, 0
    for phase in phases:
        start = factor if phase.start_factor is None else phase.start_factor
        begin = first if phase.tokens is None else exact
        end: int | None
        if phase.tokens is not None:
            end = bisect_left(range(steps + 1), exact + phase.tokens, lo=first, key=tokens)
        else:
            end = None if phase.steps is None else first + phase.steps
        length = phase.tokens or phase.steps
        span = Span(phase, first, end if end is not None and end <= steps else None, begin, length, start)
        spans.append(span)
        if span.end is None:
            break
        assert length is not None
        first, factor = span.end, span.factor(begin + length)
        exact = begin + length if phase.tokens is not None else tokens(first)
    return spans


def factor_at(step: int, spans: Sequence[Span], tokens: TokensBefore) -> float:
    """Return the learning rate of the step after the first ``step`` steps, as a fraction of the peak."""
    span = spans[bisect_right(spans, step, key=lambda one: one.first) - 1]
    return span.factor(step if span.phase.tokens is None else tokens(step))


def check(context: JobContext[LRPhasesSection]) -> Iterator[Problem]:
    """Require phases that cover all steps of the job, and have a step each."""
    phases, steps = context.section.phases, context.job.steps
    if phases is None:
        fix = 'add [[lr_scheduler.phases]], or set lr_scheduler.name to another schedule, such as "wsd"'
        yield context.job.config.problem("lr_scheduler.name", "needs lr_scheduler.phases, and there are none", fix)
        return
    if not context.job.knows_stages:
        return
    spans = spans_of(phases, context.job.tokens_before, steps)
    for number, span in enumerate(spans):
        if span.end == span.first:
            why = f"no step begins in these {span.length:,} tokens; a step has {_step_tokens(context, span.first):,}"
            yield Problem(_where(context, number), why, "make the phase longer, or remove it")
    last = spans[-1]
    if last.end is not None and last.end < steps:
        fix = "add a last phase of shape 'constant', which needs no length, or make a phase longer"
        yield context.job.config.problem("training.steps", f"lr_scheduler.phases end after step {last.end}", fix)


def _where(context: JobContext[LRPhasesSection], number: int) -> str:
    return context.job.config.where(f"lr_scheduler.phases[{number}]")


def _step_tokens(context: JobContext[LRPhasesSection], step: int) -> int:
    return context.job.tokens_before(step + 1) - context.job.tokens_before(step)


def build(context: LRScheduleContext[LRPhasesSection]) -> LambdaLR:
    """Build the schedule on torch's ``LambdaLR``, whose state is one number."""
    from torch.optim.lr_scheduler import LambdaLR

    phases = context.section.phases or ()  # `check` requires some
    tokens = context.job.tokens_before
    spans = spans_of(phases, tokens, context.steps)
    if (unfinished := _unfinished(spans, phases, tokens, context.steps)) is not None:
        log.warning("lr_scheduler.phases: %s", unfinished)
    return LambdaLR(context.optimizer, partial(factor_at, spans=spans, tokens=tokens))


def _unfinished(spans: Sequence[Span], phases: Sequence[LRPhase], tokens: TokensBefore, steps: int) -> str | None:
    """Return how much of the phases is after the end of training; ``None`` if nothing is."""
    last = spans[-1]
    if last.length is None or (last.end is not None and len(spans) == len(phases)):
        return None
    if last.end is not None:
        return f"training ends after step {steps}, before phases[{len(spans)}]"
    place, unit = (steps, "steps") if last.phase.tokens is None else (tokens(steps), "tokens")
    return f"training ends after {place - last.begin:,} of the {last.length:,} {unit} of phases[{len(spans) - 1}]"


def job_facts(job: AssembledJob) -> list[JobFact]:
    """Return the phases by step, for ``titan job show``."""
    phases = job.section(LRPhasesSection).phases or ()
    tokens = job.tokens_before
    values = []
    for span in spans_of(phases, tokens, job.steps):
        end = job.steps if span.end is None else span.end
        until = span.factor(end if span.phase.tokens is None else tokens(end))
        values.append({"shape": span.phase.shape, "first_step": span.first + 1, "last_step": end,
                       "start_factor": span.start, "end_factor": until})  # fmt: skip
    text = ", ".join(
        f"{value['first_step']}-{value['last_step']} {value['shape']} "
        + (f"{value['start_factor']:g}" if value["shape"] == "constant" else
           f"{value['start_factor']:g} -> {value['end_factor']:.4g}")
        for value in values
    )  # fmt: skip
    return [JobFact("lr phases", f"steps {text}", values)]
