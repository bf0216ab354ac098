"""Numbers that go wrong, planted and found: NaN in an output, in a gradient, in a weight; spikes of the loss."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.gloo_pool import GlooPool
from harness.jobs import RunRecord, run_recipe
from harness.planting import SETTINGS, SPIKES, Plant, Spike, findings, planted
from titan_core.api.hookspecs import hookimpl
from titan_core.api.runs.json_lines import read_lines
from titan_core.train.finite_guard import MOST_SKIPPED, NonFiniteError
from titan_debug.numerics.loss_spike import LossSpikeError, SpikeDetector


def test_a_gradient_that_overflows_is_named(in_tmp: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"step 2: the loss is [0-9.]+ and the gradient norm (nan|inf)"):
        run_recipe("tiny", SETTINGS, observers=[Plant(2, "layers.1.feed_forward.w1", gradient=True)])
    (told,) = findings(in_tmp)
    assert told.startswith("step 2: all outputs of a second forward pass are finite; the first gradient that is not")
    assert "that of layers.1.feed_forward.w1.weight on rank 0" in told


def test_a_bad_weight_is_distinguished_from_a_bad_output(in_tmp: Path) -> None:
    class Spoil:
        @hookimpl
        def titan_train_start(self, run: Any) -> None:
            with torch.no_grad():
                run.parts[0].module.get_parameter("layers.2.attention.wo.weight")[0, 0] = float("nan")

    with pytest.raises(NonFiniteError):
        run_recipe("tiny", SETTINGS, observers=[Spoil()])
    (told,) = findings(in_tmp)
    assert "is that of layers.2.attention.wo on rank 0; its parameter layers.2.attention.wo.weight is not" in told


def test_one_that_does_not_happen_again_is_reported(in_tmp: Path) -> None:
    class Once(Plant):
        def spoil(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            return super().spoil(module, inputs, output) if torch.is_grad_enabled() else output

    record = run_recipe("tiny", {**SETTINGS, "training.on_nan": "skip"}, observers=[Once(2, "layers.0", until=3)])
    assert record.reason == "all steps are done"
    told = findings(in_tmp)
    assert told[0].startswith("step 2: a second forward pass is finite throughout, and the first was not: ")


def test_looking_changes_nothing(in_tmp: Path) -> None:
    """Not the weights, not the gradients, not what random numbers a model draws."""

    def with_dropout() -> Any:
        class Dropout:
            @hookimpl
            def titan_train_start(self, run: Any) -> None:
                drop = lambda module, inputs, output: nn.functional.dropout(output, 0.1)  # noqa: E731
                run.parts[0].module.get_submodule("layers.1").register_forward_hook(drop)

        return Dropout()

    plain = run_recipe("tiny", SETTINGS, observers=[with_dropout()])
    looked = run_recipe("tiny", {**SETTINGS, "numerics.statistics_freq": 1}, observers=[with_dropout()])
    assert plain.losses == looked.losses


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_module_with_a_bad_output_is_named(gloo: GlooPool, tmp_path: Path, ranks: int) -> None:
    told = gloo.run(ranks, planted, str(tmp_path), (3, "layers.3"), {})
    assert "step 3: the loss is nan" in told[0]
    holders = "ranks 0, 1" if ranks == 2 else "rank 0"
    assert findings(tmp_path) == [f"step 3: the first output that is not finite is that of layers.3 on {holders}"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_bad_steps_are_left_out(gloo: GlooPool, tmp_path: Path, ranks: int) -> None:
    skip = {"training.on_nan": "skip", "training.steps": 6}
    for record in gloo.run(ranks, planted, str(tmp_path), (2, "layers.1", False, 4), skip):
        assert [loss == loss for loss in record.losses] == [True, False, False, True, True, True]
        assert all(norm == norm for norm in record.grad_norms[3:])
    lines = read_lines(tmp_path / "run/metrics.jsonl")
    assert [line["skipped_steps"] for line in lines] == [0, 1, 1, 0, 0, 0]
    assert [line["tokens_seen"] for line in lines] == [128 * step for step in range(1, 7)]  # their data counts as read


def test_endless_bad_steps_end_the_run(in_tmp: Path) -> None:
    settings = {**SETTINGS, "training.on_nan": "skip", "training.steps": 50}
    with pytest.raises(NonFiniteError, match=f"step {MOST_SKIPPED + 1}: .* this is the {MOST_SKIPPED}th such step in a row"):
        run_recipe("tiny", settings, observers=[Plant(2, "layers.1")])


def test_after_a_warning_training_continues(in_tmp: Path) -> None:
    settings = {**SETTINGS, "training.on_nan": "warn", "numerics.locate_nan": "false"}
    record = run_recipe("tiny", settings, observers=[Plant(3, "layers.1", False, 4)])
    assert len(record.losses) == 4
    assert findings(in_tmp)[0].startswith("step 3: the loss is nan and the gradient norm nan")


def test_a_spike_is_a_loss_far_above_those_before_it() -> None:
    detector = SpikeDetector(window=64, sigma=6.0)
    losses = [5.0 + 0.1 * (-1) ** step for step in range(64)]
    assert [detector.add(loss) for loss in losses] == [None] * 64
    assert detector.add(5.55) is None  # 5.5 standard deviations
    told = detector.add(6.5)
    assert told is not None
    assert (
        told.startswith("the loss is 6.5000, 12.") and "standard deviations above the mean of the 64 before it (5.0" in told
    )
    assert detector.add(float("nan")) is None and detector.add(3.0) is None  # another guard's; and what falls is welcome
    assert sum(detector.add(9.0) is not None for _ in range(64)) < 8  # a new level is reported, and gets accepted


def spiked(folder: str, action: str) -> RunRecord | str:
    os.chdir(folder)
    try:
        settings = {**SETTINGS, **SPIKES, "numerics.spike_action": action}
        return run_recipe("tiny", settings, weights=True, observers=[Spike(11, "output", until=12)])
    except LossSpikeError as error:
        return str(error)


@pytest.mark.parametrize("action", ["warn", "skip", "stop", "off"])
def test_a_planted_spike(gloo: GlooPool, tmp_path: Path, action: str) -> None:
    told = gloo.run(2, spiked, str(tmp_path), action)
    found = findings(tmp_path)
    if action == "off":
        assert found == []
        return
    assert len(found) == 1 and "standard deviations above the mean of the 8 before it" in found[0]
    event = next(one for one in read_lines(tmp_path / "run/events.jsonl") if one["event"] == "finding")
    assert (event["kind"], event["step"]) == ("loss spike", 11)
    if action == "stop":
        assert all("step 11: the loss is" in one and 'numerics.spike_action = "stop" ends the run' in one for one in told)
    else:
        assert [len(one.losses) for one in told] == [14, 14]
        skipped = [line["skipped_steps"] for line in read_lines(tmp_path / "run/metrics.jsonl")]
        assert skipped == [0] * 10 + [int(action == "skip")] + [0] * 3


@pytest.mark.parametrize("plant", [(3, "layers.3")])
def test_the_command_line_tells_it_without_a_traceback(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], plant: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from titan_core.cli.main import main
    from titan_core.train import trainer

    original: Callable[..., Any] = trainer.train
    monkeypatch.setattr(trainer, "train", lambda job, observers=(): original(job, [*observers, Plant(*plant)]))
    assert main(["train", "tiny", *(text for key, value in SETTINGS.items() for text in (f"--{key}", str(value)))]) == 1
    error = capsys.readouterr().err
    assert "titan: stopped: step 3: the loss is nan" in error and "Traceback" not in error
