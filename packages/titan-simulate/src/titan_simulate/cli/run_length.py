"""Duration and costs of a planned run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from titan_core.toolkit.text import show_count
from titan_simulate.plan.result import Figures


@dataclass(frozen=True)
class RunLength:
    """A run on some devices, without starts, checkpoints and validation."""

    steps: int
    days: float
    gpu_hours: float
    price: float | None
    """Of all GPU-hours."""

    @classmethod
    def of(cls, tokens: int, figures: Figures, gpus: int, price: float | None) -> RunLength:
        """Return the length of a run of at least ``tokens`` tokens, in whole steps, at the speed of ``figures``.

        Args:
            price: of a device for an hour, if it is known.
        """
        per_step = round(figures.tokens_per_second_per_gpu * figures.step_seconds * gpus)
        steps = -(-tokens // per_step)
        hours = steps * figures.step_seconds / 3600
        return cls(steps, hours / 24, hours * gpus, None if price is None else hours * gpus * price)

    def as_json(self, budget_hours: float | None) -> dict[str, Any]:
        """Return the same as plain values."""
        within = {} if budget_hours is None else {"within_budget": self.gpu_hours <= budget_hours}
        return {**asdict(self), **within}

    def describe(self, tokens: int, budget_hours: float | None) -> str:
        """Return the same in one line."""
        price = "" if self.price is None else f", price {show_amount(self.price)}"
        days, hours = show_amount(self.days), show_amount(self.gpu_hours)
        text = f"{show_count(tokens)} tokens: {self.steps:,} steps, {days} days, {hours} GPU-hours{price}"
        if budget_hours is None:
            return text
        verdict = "within" if self.gpu_hours <= budget_hours else "MORE THAN"
        return f"{text}; {verdict} the budget of {show_amount(budget_hours)}"


def show_amount(value: float) -> str:
    """Return a positive number with at least two digits: ``"1,234"``, ``"12"``, ``"0.012"``."""
    return f"{value:,.{max(0, 1 - math.floor(math.log10(value)))}f}"
