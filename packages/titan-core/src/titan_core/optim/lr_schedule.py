"""Warmup, stable, decay."""

from __future__ import annotations

import logging
import math
import warnings
from functools import partial

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from titan_core.api.optimizer import LRScheduleContext
from titan_core.api.sections import LRSchedulerSection

log = logging.getLogger(__name__)


def build_wsd(context: LRScheduleContext[LRSchedulerSection]) -> LambdaLR:
    """The schedule as torch's own scheduler, whose state is one number."""
    section, steps = context.section, context.steps
    warmup, decay = _phases(section, steps)
    if warmup < section.warmup_steps:
        log.warning(
            "lr_scheduler.warmup_steps = %d: training has %d steps; warming up over all", section.warmup_steps, steps
        )
    elif section.decay_ratio is not None and decay < round(steps * section.decay_ratio):
        log.warning("lr_scheduler: warmup and decay are longer than %d steps; decaying over %d", steps, decay)
    return LambdaLR(context.optimizer, partial(wsd_factor, section=section, steps=steps))


def advance(scheduler: LRScheduler, updated: bool) -> None:
    """Step ``scheduler``.

    Args:
        updated: whether the optimizer took its step. Where it did not, on purpose, torch would warn of the wrong order.
    """
    if updated:
        scheduler.step()
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)` before", UserWarning)
        scheduler.step()


def wsd_factor(step: int, section: LRSchedulerSection, steps: int) -> float:
    """Learning rate of step ``step`` (counted from 0) as a share of the peak, as TorchTitan defines it: a linear rise over
    ``warmup_steps``, a plateau, and a decay over the last ``decay_ratio`` of all steps (from the warmup on where there is
    no ratio, or no room for it), which would reach ``min_lr_factor`` one step after the last, so that no step is wasted."""
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
    """Steps of warmup and of decay; what is longer than training is cut to it, the warmup first."""
    warmup = min(section.warmup_steps, steps)
    room = steps - warmup
    return warmup, room if section.decay_ratio is None else min(room, round(steps * section.decay_ratio))
