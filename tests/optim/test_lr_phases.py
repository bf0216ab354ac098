"""Phases of the learning rate: equal to torch's schedules and to formulas, by steps and by tokens, and what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, PolynomialLR, SequentialLR

from titan_core.api import UserError
from titan_core.api.config.sections import LRSchedulerSection
from titan_core.loop.build import build_lr_scheduler
from titan_core.optim.lr_schedule import wsd_factor
from titan_optim.lr_phases import factor_at, job_facts, spans_of
from titan_optim.lr_phases_config import LRPhase, LRPhasesSection
from titan_testing.jobs import TINY, make_job, run_job

WARMUP = {"shape": "linear", "steps": 4, "start_factor": 0.0, "end_factor": 1.0}
PEAK = 0.25


def phases(*tables: dict[str, Any]) -> list[LRPhase]:
    found = LRPhasesSection(phases=[LRPhase(**table) for table in tables]).phases
    assert found is not None
    return found


def factors(steps: int, *tables: dict[str, Any], tokens: Callable[[int], int] = lambda step: 100 * step) -> list[float]:
    spans = spans_of(phases(*tables), tokens, steps)
    return [factor_at(step, spans, tokens) for step in range(steps)]


def of_torch(steps: int, make: Callable[[torch.optim.Optimizer], LRScheduler]) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    schedule, found = make(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"] / PEAK)
        optimizer.step()
        schedule.step()
    return found


def warmed_up(optimizer: torch.optim.Optimizer, after: LRScheduler) -> LRScheduler:
    return SequentialLR(optimizer, [LinearLR(optimizer, start_factor=0.125, total_iters=4), after], milestones=[4])


FLOOR = {"shape": "constant"}
TORCH: dict[str, tuple[dict[str, Any], Callable[[torch.optim.Optimizer], LRScheduler]]] = {
    "linear": (
        {"shape": "linear", "end_factor": 0.2},
        lambda optimizer: LinearLR(optimizer, start_factor=1.0, end_factor=0.2, total_iters=10),
    ),
    "cosine": (
        {"shape": "cosine", "end_factor": 0.1},
        lambda optimizer: CosineAnnealingLR(optimizer, T_max=10, eta_min=0.1 * PEAK),
    ),
    "polynomial": (
        {"shape": "polynomial", "end_factor": 0.0, "exponent": 2.5},
        lambda optimizer: PolynomialLR(optimizer, total_iters=10, power=2.5),
    ),
}


@pytest.mark.parametrize("shape", TORCH)
def test_shapes_of_torch_after_a_warmup(shape: str) -> None:
    table, make = TORCH[shape]
    ours = factors(14, {**WARMUP, "start_factor": 0.125}, {**table, "steps": 10})
    assert ours == pytest.approx(of_torch(14, lambda optimizer: warmed_up(optimizer, make(optimizer))), rel=1e-9)


def test_warmup_and_decay_of_the_default_schedule() -> None:
    """docs/schedules.md says which phases are the same as ``wsd``."""
    section = LRSchedulerSection(warmup_steps=5, decay_ratio=0.4, decay_type="sqrt", min_lr_factor=0.1)
    default = [wsd_factor(step, section, 20) for step in range(20)]
    warmup = {"shape": "linear", "steps": 4, "start_factor": 1 / 5, "end_factor": 1.0}
    decay = {"shape": "sqrt", "steps": 8, "end_factor": 0.1}
    assert factors(20, warmup, {"shape": "constant", "steps": 8}, decay) == pytest.approx(default)


def test_power_laws_fall_with_the_steps_since_the_start_of_training() -> None:
    expected = [0, 0.25, 0.5, 0.75] + [math.sqrt(4 / step) for step in range(4, 30)]
    assert factors(30, WARMUP, {"shape": "inverse_sqrt"}) == pytest.approx(expected)
    third = [2 * (4 / step) ** 0.3 for step in range(4, 10)]
    decay = {"shape": "linear", "steps": 2, "end_factor": 0.0}
    power = {"shape": "power", "exponent": 0.3, "steps": 6}
    found = factors(12, {**WARMUP, "end_factor": 2.0}, power, decay)
    assert found[4:10] == pytest.approx(third)
    assert found[10:] == pytest.approx([2 * (4 / 10) ** 0.3, (4 / 10) ** 0.3])  # continuous, and half way down


def test_phases_in_tokens_where_steps_grow() -> None:
    """Steps of 100 tokens each, and of 300 from step 5 on: a phase of 1,000 tokens ends within the seventh."""

    def tokens(step: int) -> int:
        return 100 * min(step, 4) + 300 * max(0, step - 4)

    up = {"shape": "linear", "tokens": 1000, "start_factor": 0.0, "end_factor": 1.0}
    down = {"shape": "linear", "tokens": 1000, "end_factor": 0.0}
    found = factors(11, up, down, FLOOR, tokens=tokens)
    assert found[:7] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.7, 1.0])
    assert found[7:] == pytest.approx([0.7, 0.4, 0.1, 0.0])
    # Step 6 begins with all 900 tokens behind it. The next phase is counted from there on, not from the step's 1,000.
    up, down = {**up, "tokens": 900}, {**down, "tokens": 900}
    assert factors(9, up, down, FLOOR, tokens=tokens)[5:] == pytest.approx([7 / 9, 1 - 1 / 9, 1 - 4 / 9, 1 - 7 / 9])
    # A phase in steps begins at the step after it, whatever its tokens.
    assert factors(9, up, {"shape": "linear", "steps": 2, "end_factor": 0.0}, FLOOR, tokens=tokens)[6:] == [1, 0.5, 0]
    # Tokens are counted from the start of a phase after one in steps.
    found = factors(7, {**WARMUP, "steps": 5}, {"shape": "power", "tokens": 600, "exponent": 1.0}, tokens=tokens)
    assert found[5:] == pytest.approx([1.0, 700 / 1000])


def test_a_jump_that_is_stated() -> None:
    again = {"shape": "cosine", "steps": 4, "start_factor": 1.0, "end_factor": 0.5, "jump": True}
    found = factors(12, {"shape": "cosine", "steps": 4, "end_factor": 0.0}, again, again)
    assert found[3] == pytest.approx((1 + math.cos(math.pi * 3 / 4)) / 2)
    assert [found[4], found[8]] == [1.0, 1.0]


REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "both lengths": ([{**WARMUP, "tokens": 3}], "one in tokens: remove one"),
    "no length": ([{"shape": "cosine", "end_factor": 0.0}], "a cosine phase needs a length"),
    "no end": ([{"shape": "linear", "steps": 3}], "a linear phase needs an end_factor"),
    "end of a constant": ([{"shape": "constant", "end_factor": 0.1}], "end_factor has no effect .* 'constant'"),
    "end of a law": ([WARMUP, {"shape": "power", "exponent": 1.0, "end_factor": 0.1}], "end_factor has no effect"),
    "no exponent": ([WARMUP, {"shape": "power"}], "a power phase needs an exponent"),
    "exponent of a line": ([{**WARMUP, "exponent": 2.0}], "exponent has no effect .* 'linear'"),
    "exponent of inverse_sqrt": ([WARMUP, {"shape": "inverse_sqrt", "exponent": 0.5}], "exponent has no effect"),
    "open in the middle": ([{"shape": "constant"}, {"shape": "constant"}], r"phases\[0\]: only the last phase"),
    "a law first": ([{"shape": "inverse_sqrt"}], r"phases\[0\]: .* cannot be the first"),
    "a jump": ([WARMUP, {"shape": "constant", "start_factor": 0.5}], r"phases\[1\]: it starts at 0.5, .* at 1: set jump"),
    "a jump from a law": (
        [WARMUP, {"shape": "power", "exponent": 1.0, "steps": 2}, {"shape": "constant", "start_factor": 0.5}],
        "depends on the job: set jump = true",
    ),
    "no jump": ([WARMUP, {"shape": "constant", "start_factor": 1.0, "jump": True}], "there is no jump: remove jump"),
    "a jump to nowhere": ([WARMUP, {"shape": "constant", "jump": True}], "needs a start_factor"),
    "a jump from nowhere": ([{"shape": "constant", "start_factor": 0.5, "jump": True}], "no phase before it to jump from"),
    "a flat line": ([{"shape": "linear", "steps": 3, "end_factor": 1.0}], "from 1 to 1: set start_factor"),
    "no steps": ([{**WARMUP, "steps": 0}], "greater than 0"),
    "no tokens": ([{"shape": "constant", "tokens": -1}], "greater than 0"),
    "not finite": ([{**WARMUP, "start_factor": math.nan}], "finite"),
    "negative": ([{**WARMUP, "end_factor": -1.0}], "greater than or equal to 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_phases_that_make_no_sense_are_refused(case: str) -> None:
    tables, message = REFUSED[case]
    with pytest.raises(ValidationError, match=message):
        phases(*tables)


def settings(*tables: str, **more: object) -> dict[str, object]:
    phases = {"lr_scheduler.phases": f"[{', '.join(tables)}]"} if tables else {}
    return {**TINY, "lr_scheduler.name": "phases", "lr_scheduler.warmup_steps": 200, "training.steps": 6, **phases, **more}


LINE = '{shape = "linear", steps = 2, start_factor = 0.5, end_factor = 1.0}'


def test_a_job_follows_its_phases(in_tmp: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Steps of 4 sequences of 32 tokens: a phase of 256 tokens takes two."""
    job = make_job("tiny", settings(LINE, '{shape = "constant", tokens = 256}', '{shape = "inverse_sqrt"}'))
    (fact,) = job_facts(job)
    assert fact.text == "steps 1-2 linear 0.5 -> 1, 3-4 constant 1, 5-6 inverse_sqrt 1 -> 0.8165"
    record = run_job(job)
    assert record.learning_rates == pytest.approx([2e-3 * part for part in (0.5, 0.75, 1, 1, 1, math.sqrt(4 / 5))])
    assert "lr_scheduler.phases" not in caplog.text


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('{shape = "linear", steps = 8, end_factor = 0.0}', r"training ends after 4 of the 8 steps of phases\[1\]"),
        ('{shape = "linear", tokens = 1024, end_factor = 0.0}', r"ends after 512 of the 1,024 tokens of phases\[1\]"),
        ('{shape = "constant", steps = 4}, {shape = "linear", steps = 1, end_factor = 0.0}', r"ends after 0 of the 1 steps"),
        (
            '{shape = "constant", steps = 9}, {shape = "linear", steps = 1, end_factor = 0.0}',
            r"4 of the 9 steps of phases\[1\]",
        ),
    ],
)
def test_phases_that_training_does_not_reach_are_logged(
    in_tmp: Any, caplog: pytest.LogCaptureFixture, table: str, message: str
) -> None:
    job = make_job("tiny", settings(LINE, table))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    build_lr_scheduler(job, optimizer)
    assert re.search(message, caplog.text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (settings(), "needs lr_scheduler.phases, and there are none"),
        (settings(LINE), "lr_scheduler.phases end after step 2; add a last phase"),
        (
            settings(LINE, '{shape = "constant", tokens = 2}', '{shape = "constant", tokens = 2}', '{shape = "constant"}'),
            r"phases\[2\]: no step begins in these 2 tokens; a step has 128",
        ),
        (settings("{shape = 'linear', steps = 2, end_factor = 2e12}"), r"phases\[0\].end_factor = 2"),
    ],
)
def test_phases_that_do_not_fit_the_job_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_job("tiny", given)


def test_keys_of_another_schedule_are_noted() -> None:
    job = make_job("tiny", settings('{shape = "constant"}', **{"lr_scheduler.warmup_steps": 3}))
    assert "lr_scheduler.warmup_steps has no effect on a schedule with lr_scheduler.name = 'phases'" in job.notes
    job = make_job("tiny", {**TINY, "lr_scheduler.phases": '[{shape = "constant"}]'})
    assert "lr_scheduler.phases has no effect on a schedule with lr_scheduler.name = 'wsd'" in job.notes
