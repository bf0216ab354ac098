"""Phases of the learning rate in resumed runs and in branches: decays of any length off one long run."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.resuming import run_in
from titan_core.cli.main import main
from titan_testing.jobs import run_recipe

WARMUP = '{shape = "linear", steps = 2, start_factor = 0.5, end_factor = 1.0}'
PLATEAU = f'[{WARMUP}, {{shape = "constant"}}]'
# Steps of 8 sequences of 48 tokens: 4 steps in which the rate falls.
DECAY = f'[{WARMUP}, {{shape = "constant", steps = 2}}, {{shape = "sqrt", tokens = 1536, end_factor = 0.0}}]'
SETTINGS: dict[str, object] = {"lr_scheduler.name": "phases", "lr_scheduler.warmup_steps": 200}


@pytest.mark.full
def test_a_decay_off_a_plateau_equals_a_run_that_was_meant_to_decay(in_tmp: Path) -> None:
    plateau = run_in(str(in_tmp), {**SETTINGS, "lr_scheduler.phases": PLATEAU})
    always = run_in(str(in_tmp), {**SETTINGS, "lr_scheduler.phases": DECAY, "job.dump_folder": "always"})
    assert always.learning_rates[:5] == plateau.learning_rates[:5]
    assert always.learning_rates[5:] != plateau.learning_rates[5:]
    arguments = ["run", "branch", "outputs/tiny", "--at", "3", "--to", "decayed", "--lr_scheduler.phases", DECAY]
    assert main(arguments) == 0
    decayed = run_recipe("decayed/config.toml", weights=True)
    assert decayed.learning_rates == always.learning_rates[3:]
    assert decayed.losses == always.losses[3:]
    assert all(tensor.equal(always.final[name]) for name, tensor in decayed.final.items())


def test_a_resumed_run_with_another_batch_has_the_phases_of_its_tokens(in_tmp: Path) -> None:
    falling = '[{shape = "linear", tokens = 3072, end_factor = 0.0}]'
    settings = {**SETTINGS, "lr_scheduler.phases": falling, "data.logical_shards": 4, "optimizer.lr": 1.0}
    before = run_in(str(in_tmp), {**settings, "training.stop_at_step": 3})
    assert before.learning_rates == pytest.approx([1, 7 / 8, 6 / 8])
    changed = {"training.global_batch_size": 4, "checkpoint.allow_changed": '["training.global_batch_size"]'}
    after = run_in(str(in_tmp), {**settings, **changed})
    # Step 3 has 3 * 4 * 48 tokens before it in the new plan: 3 / 16 of the phase. It does not reach its end.
    assert after.learning_rates == pytest.approx([1 - step / 16 for step in range(3, 8)])
