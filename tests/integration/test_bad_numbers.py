"""NaN and loss spikes are detected on every mesh and across restarts: see ``tests/debug/test_numerics.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.planting import SETTINGS, SPIKES, Plant, Spike, findings, planted
from harness.quick import rows
from titan_core.loop.finite_guard import MOST_SKIPPED, NonFiniteError
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import run_recipe
from titan_testing.meshes import PP, SCHEDULE, TP

COMPILED = {"compile.enable": "true", "compile.backend": "eager", "compile.fullgraph": "false"}
MESHES: dict[str, tuple[int, dict[str, object]]] = {
    "one device": (1, {}),
    "FSDP 2": (2, {}),
    "TP 2": (2, {TP: 2}),
    "PP 2": (2, {PP: 2}),
    # Rank 0 has stages 0 and 2. Stage 2 follows the bad stage and receives its bad output.
    "PP 2, interleaved": (2, {PP: 2, SCHEDULE: "Interleaved1F1B"}),
    "recomputed and compiled": (1, {"activation_checkpoint.mode": "full", **COMPILED}),
}


@pytest.mark.parametrize("mesh", rows(MESHES, ()))
def test_the_first_module_with_a_bad_output_is_named(gloo: GlooPool, tmp_path: Path, mesh: str) -> None:
    ranks, overrides = MESHES[mesh]
    module = "layers.1" if "interleaved" in mesh else "layers.3"
    report = gloo.run(ranks, planted, str(tmp_path), (3, module), overrides)
    assert "step 3: the loss is nan" in report[0]
    holders = "ranks 0-1" if mesh in ("FSDP 2", "TP 2") else "rank 1" if "PP" in mesh else "rank 0"
    expected = f"step 3: the first output that is not finite is that of {module} on {holders}"
    assert findings(tmp_path) == [expected]


@pytest.mark.full
def test_consecutive_bad_steps_are_counted_across_restarts(in_tmp: Path) -> None:
    settings = {**SETTINGS, "training.on_nan": "skip", "training.steps": 50, "checkpoint.enable": "true"}
    run_recipe("tiny", {**settings, "training.stop_at_step": 6}, observers=[Plant(2, "layers.1")])
    with pytest.raises(NonFiniteError, match=f"step {MOST_SKIPPED + 1}: .* this is the {MOST_SKIPPED}th such step in a row"):
        run_recipe("tiny", settings, observers=[Plant(2, "layers.1")])


@pytest.mark.full
def test_a_resumed_run_remembers_earlier_losses(in_tmp: Path) -> None:
    settings = {**SETTINGS, **SPIKES, "numerics.spike_action": "skip", "checkpoint.enable": "true"}
    run_recipe("tiny", {**settings, "training.stop_at_step": 9})
    run_recipe("tiny", settings, observers=[Spike(11, "output", until=12)])
    (found,) = findings(in_tmp)
    assert found.startswith("the loss is") and "the mean of the preceding 8 losses" in found
