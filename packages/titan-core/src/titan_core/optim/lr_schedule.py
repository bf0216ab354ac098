"""The warmup-stable-decay learning-rate schedule."""

from __future__ import annotations

import logging
import math
import warnings
from functools import partial

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from titan_core.api import LRScheduleContext
from titan_core.api.config.sections import LRSchedulerSection

log = logging.getLogger(__name__)


def build_wsd(context: LRScheduleContext[LRSchedulerSection]) -> LambdaLR:
    """Build the schedule on torch's ``LambdaLR``, whose state is one number."""
    section, steps = context.section, context.steps
    warmup, decay = _phases(section, steps)
    if warmup < section.warmup_steps:
        log.warning(
            "lr_scheduler.warmup_steps = %d: training has only %d steps; warming up over all of them",
            section.warmup_steps,
            steps,
        )
    elif section.decay_ratio is not None and decay < round(steps * section.decay_ratio):
        log.warning("lr_scheduler: warmup and decay together exceed %d steps; decaying over %d", steps, decay)
    return LambdaLR(context.optimizer, partial(wsd_factor, section=section, steps=steps))


def advance(scheduler: LRScheduler, updated: bool) -> None:
    """Step ``scheduler``.

    Args:
        updated: whether the optimizer took its step. If it skipped the step, torch's warning about the order is suppressed.
    """
    if updated:
        scheduler.step()
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)` before", UserWarning)
        scheduler.step()


def wsd_factor(step: int, section: LRSchedulerSection, steps: int) -> float:
    """Return the learning rate of ``step`` (counted from 0) as a fraction of the peak, as defined by TorchTitan.

    The rate rises linearly over ``warmup_steps``, stays at the peak, and decays over the last ``decay_ratio`` of all steps.
    Without a ratio, or without room for it, the decay begins after the warmup. It would reach ``min_lr_factor`` one step
    after the last, so that no step is wasted.
    """
    warmup, decay = _phases(section, steps)
    if step < warmup:
        return (step + 1) / warmup
    plateau_end = steps + 1 - decay
    if decay == 0 or step < plateau_end:
        return 1.0
    progress = min(1.0, (step + 1 - plateau_end) / decay)
    match section.decay_type:
        case "linear":
            factor = 1.0 - progress
        case "sqrt":
            factor = 1.0 - math.sqrt(progress)
        case "cosine":
            factor = 0.5 * (1.0 + math.cos(math.pi * progress))
    return section.min_lr_factor + (1.0 - section.min_lr_factor) * factor


def _phases(section: LRSchedulerSection, steps: int) -> tuple[int, int]:
    """Return the number of warmup and of decay steps, shortened to fit the training; warmup takes precedence."""
    warmup = min(section.warmup_steps, steps)
    room = steps - warmup
    return warmup, room if section.decay_ratio is None else min(room, round(steps * section.decay_ratio))
