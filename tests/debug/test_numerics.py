"""Planted numerical faults and their reports: NaN in an output, a gradient or a weight; loss spikes."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.planting import SETTINGS, SPIKES, Plant, Spike, findings, planted, planted_late
from harness.quick import rows
from titan_core.api import hookimpl
from titan_core.loop.finite_guard import MOST_SKIPPED, NonFiniteError
from titan_core.toolkit.errors import EXIT_NUMERICS
from titan_core.toolkit.json_lines import read_lines
from titan_debug.numerics.loss_spike import DeviceSpikeDetector, LossSpikeError, SpikeDetector
from titan_debug.torch_private import uncompiled
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, run_recipe


def test_a_gradient_that_overflows_is_named(in_tmp: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"step 2: the loss is [0-9.]+ and the gradient norm (nan|inf)"):
        run_recipe("tiny", SETTINGS, observers=[Plant(2, "layers.1.feed_forward.w1", gradient=True)])
    (finding,) = findings(in_tmp)
    assert finding == (
        "step 2: repeating the forward pass gives finite outputs; the first gradient in the order of backward that is not "
        "finite is that of layers.1.feed_forward.w1.weight on rank 0"
    )


def test_a_bad_weight_is_distinguished_from_a_bad_output(in_tmp: Path) -> None:
    class Spoil:
        @hookimpl
        def titan_train_start(self, run: Any) -> None:
            with torch.no_grad():
                run.parts[0].module.get_parameter("layers.2.attention.wo.weight")[0, 0] = float("nan")

    with pytest.raises(NonFiniteError):
        run_recipe("tiny", SETTINGS, observers=[Spoil()])
    (finding,) = findings(in_tmp)
    assert "is that of layers.2.attention.wo on rank 0; its parameter layers.2.attention.wo.weight is already" in finding


def test_a_nan_that_cannot_be_reproduced_is_reported(in_tmp: Path) -> None:
    class Once(Plant):
        def spoil(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            return super().spoil(module, inputs, output) if torch.is_grad_enabled() else output

    record = run_recipe("tiny", {**SETTINGS, "training.on_nan": "skip"}, observers=[Once(2, "layers.0", until=3)])
    assert record.reason == "all steps are done"
    assert findings(in_tmp)[0].startswith(
        "step 2: the loss is not finite, but repeating the forward pass gives finite values"
    )


@pytest.mark.full
def test_observation_does_not_affect_training(in_tmp: Path) -> None:
    """Neither the weights nor the gradients nor the random numbers that a model draws."""

    def with_dropout() -> Any:
        class Dropout:
            @hookimpl
            def titan_train_start(self, run: Any) -> None:
                drop = lambda module, inputs, output: nn.functional.dropout(output, 0.1)  # noqa: E731
                run.parts[0].module.get_submodule("layers.1").register_forward_hook(drop)

        return Dropout()

    plain = run_recipe("tiny", SETTINGS, observers=[with_dropout()])
    observed = run_recipe("tiny", {**SETTINGS, "numerics.statistics_freq": 1}, observers=[with_dropout()])
    assert plain.losses == observed.losses


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_module_with_a_bad_output_is_named(gloo: GlooPool, tmp_path: Path, ranks: int) -> None:
    errors = gloo.run(ranks, planted, str(tmp_path), (3, "layers.3"), {})
    assert "step 3: the loss is nan" in errors[0]
    holders = "ranks 0-1" if ranks == 2 else "rank 0"
    assert findings(tmp_path) == [f"step 3: the first output that is not finite is that of layers.3 on {holders}"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_bad_steps_are_skipped(gloo: GlooPool, tmp_path: Path, ranks: int) -> None:
    skip = {"training.on_nan": "skip", "training.steps": 6}
    for record in gloo.run(ranks, planted, str(tmp_path), (2, "layers.1", False, 4), skip):
        assert [loss == loss for loss in record.losses] == [True, False, False, True, True, True]
        assert all(norm == norm for norm in record.grad_norms[3:])
    lines = read_lines(tmp_path / "run/metrics.jsonl")
    assert [line["skipped_steps"] for line in lines] == [0, 1, 1, 0, 0, 0]
    assert [line["tokens_seen"] for line in lines] == [128 * step for step in range(1, 7)]  # their data counts as read


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "bad"), [(2, (2, "layers.1", False, 4)), (1, (2, "layers.1.feed_forward.w1", True, 3))], ids=["loss", "norm"]
)
def test_a_device_skips_the_steps_that_a_host_would(
    gloo: GlooPool, tmp_path: Path, ranks: int, bad: tuple[Any, ...]
) -> None:
    """Bit for bit: losses, learning rates, weights, metrics, and what the guard reports."""
    skip = {"training.on_nan": "skip", "training.steps": 6}
    runs, found, metrics = [], [], []
    for run, how in (("host", planted), ("device", planted_late)):
        (tmp_path / run).mkdir()
        runs.append(gloo.run(ranks, how, str(tmp_path / run), bad, skip))
        found.append([message for message in findings(tmp_path / run) if "its update is skipped" in message])
        metrics.append([line["skipped_steps"] for line in read_lines(tmp_path / run / "run/metrics.jsonl")])
    for host, device in zip(*runs, strict=True):
        assert repr(device.losses) == repr(host.losses) and device.learning_rates == host.learning_rates
        assert device.skipped == host.skipped == list(range(2, bad[3] if not bad[2] else 3))
        assert all(torch.equal(device.final[name], tensor) for name, tensor in host.final.items())
    assert metrics[0] == metrics[1]
    assert found[0] == found[1] and len(found[0]) == len(runs[0][0].skipped)


@pytest.mark.parametrize("on_nan", ["stop", pytest.param("warn", marks=pytest.mark.full)])
@pytest.mark.parametrize("bad", [(3, "layers.3"), (3, "layers.1.feed_forward.w1", True)], ids=["loss", "norm"])
def test_a_step_is_investigated_late_with_its_own_weights(in_tmp: Path, on_nan: str, bad: tuple[Any, ...]) -> None:
    settings = {"training.on_nan": on_nan, "training.steps": 5}
    planted(".", bad, settings)
    expected = findings(in_tmp)[0]
    planted_late(".", bad, {**settings, "job.dump_folder": "late"})
    assert read_lines(in_tmp / "late/events.jsonl")
    found = [event["message"] for event in read_lines(in_tmp / "late/events.jsonl") if event["event"] == "finding"]
    assert found[0] == expected and "step 3: " in expected


@pytest.mark.full
def test_too_many_bad_steps_in_a_row_end_the_run(in_tmp: Path) -> None:
    settings = {**SETTINGS, "training.on_nan": "skip", "training.steps": 50}
    with pytest.raises(NonFiniteError, match=f"step {MOST_SKIPPED + 1}: .* this is the {MOST_SKIPPED}th such step in a row"):
        run_recipe("tiny", settings, observers=[Plant(2, "layers.1")])


def test_after_a_warning_training_continues(in_tmp: Path) -> None:
    settings = {**SETTINGS, "training.on_nan": "warn", "numerics.locate_nan": "false"}
    record = run_recipe("tiny", settings, observers=[Plant(3, "layers.1", False, 4)])
    assert len(record.losses) == 4
    assert findings(in_tmp)[0].startswith("step 3: the loss is nan and the gradient norm nan")


def test_a_spike_is_a_loss_far_above_the_preceding_ones() -> None:
    detector = SpikeDetector(window=64, sigma=6.0)
    losses = [5.0 + 0.1 * (-1) ** step for step in range(64)]
    assert [detector.add(loss) for loss in losses] == [None] * 64
    assert detector.add(5.55) is None  # 5.5 standard deviations
    message = detector.add(6.5)
    assert message is not None
    assert (
        message.startswith("the loss is 6.5000, 12.")
        and "standard deviations above the mean of the preceding 64 losses (5.0" in message
    )
    assert (
        detector.add(float("nan")) is None and detector.add(3.0) is None
    )  # NaN is the finite guard's task, and a lower loss is no spike
    assert sum(detector.add(9.0) is not None for _ in range(64)) < 8  # a new level is reported a few times and then accepted


def test_the_device_judges_losses_as_the_host_does() -> None:
    """On windows that are not full, full and refilled, with a NaN, a spike and a new level in between."""
    generator = torch.Generator().manual_seed(1)
    losses = [*(5 + torch.randn(90, generator=generator) / 10).tolist(), float("nan"), 9.0, *[8.0] * 40, 5.0]
    host, device = SpikeDetector(window=40, sigma=4.0), DeviceSpikeDetector(window=40, sigma=4.0)
    verdicts = []
    for number, loss in enumerate(losses):
        if number == 60:  # a resumed run continues with the saved losses
            saved, device = device.last_losses(), DeviceSpikeDetector(window=40, sigma=4.0)
            device.load(saved)
        message, verdict = host.add(loss), device.add(torch.tensor(loss)).tolist()
        assert (verdict[0] == 0) == (message is not None), number
        assert device.last_losses() == pytest.approx(list(host.losses), rel=1e-6)
        verdicts.append(verdict[0] == 0)
    assert 2 <= sum(verdicts) < 12 and verdicts[91] and not verdicts[90]


def test_the_device_has_the_mean_and_deviation_of_the_losses_so_far() -> None:
    detector = DeviceSpikeDetector(window=8, sigma=4.0)
    detector.load([1.0, 3.0])
    assert detector.add(torch.tensor(6.0)).tolist() == [1.0, 6.0, 2.0, 1.0, 2.0]


def spiked(folder: str, action: str) -> RunRecord | str:
    os.chdir(folder)
    try:
        settings = {**SETTINGS, **SPIKES, "numerics.spike_action": action}
        return run_recipe("tiny", settings, weights=True, observers=[Spike(11, "output", until=12)])
    except LossSpikeError as error:
        return str(error)


@pytest.mark.parametrize("action", rows(["warn", "skip", "stop", "off"], []))
def test_a_planted_spike(gloo: GlooPool, tmp_path: Path, action: str) -> None:
    ends = gloo.run(2, spiked, str(tmp_path), action)
    found = findings(tmp_path)
    if action == "off":
        assert found == []
        return
    assert len(found) == 1 and "standard deviations above the mean of the preceding 8 losses" in found[0]
    event = next(event for event in read_lines(tmp_path / "run/events.jsonl") if event["event"] == "finding")
    assert (event["kind"], event["step"]) == ("loss spike", 11)
    if action == "stop":
        assert all("step 11: the loss is" in end and 'stopped because numerics.spike_action = "stop"' in end for end in ends)
    else:
        assert [len(end.losses) for end in ends] == [14, 14]
        skipped = [line["skipped_steps"] for line in read_lines(tmp_path / "run/metrics.jsonl")]
        assert skipped == [0] * 10 + [int(action == "skip")] + [0] * 3


@pytest.mark.parametrize("plant", [(3, "layers.3")])
def test_the_command_line_reports_a_nan_without_a_traceback(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], plant: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from titan_core.cli.main import main
    from titan_core.loop import training

    original: Callable[..., Any] = training.train
    monkeypatch.setattr(
        training, "train", lambda job, observers=(), **more: original(job, [*observers, Plant(*plant)], **more)
    )
    assert (
        main(["train", "tiny", *(text for key, value in SETTINGS.items() for text in (f"--{key}", str(value)))])
        == EXIT_NUMERICS
    )
    error = capsys.readouterr().err
    assert "titan: stopped: step 3: the loss is nan" in error and "Traceback" not in error


def test_a_repeated_forward_pass_keeps_functions_compiled() -> None:
    """FlexAttention would materialise all scores without the compiler."""
    calls: list[str] = []

    def backend(name: str) -> Callable[[torch.fx.GraphModule, list[Tensor]], Callable[..., Any]]:
        def run(graph: torch.fx.GraphModule, *inputs: Tensor) -> Any:
            calls.append(name)
            return graph(*inputs)

        return lambda graph, examples: partial(run, graph)

    attend = torch.compile(lambda value: value * 2, backend=backend("attention"))

    class Block(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return attend(value) if not torch.compiler.is_compiling() else value * 2

    block, value = Block(), torch.ones(2)
    block.compile(backend=backend("block"))
    block(value)
    with uncompiled(block.modules()):
        assert torch.equal(block(value), value * 2)
    block(value)
    assert calls == ["block", "attention", "block"]
