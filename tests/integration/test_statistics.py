"""What modules count in a step is exactly the same on every mesh, and whatever else the run does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, tensor

from harness.small_gpt import small, train_model
from titan_core.api import PendingUpdate, Run, hookimpl
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord
from titan_testing.meshes import CP, DR, PP, SCHEDULE, TP

MODE = "activation_checkpoint.mode"
NO_SP = "parallelism.disable_sequence_parallel"
ACCUMULATION = {1: {"training.local_batch_size": 8}, 4: {}}
"""Settings by the number of microbatches of one device."""
VALIDATION: dict[str, object] = {
    "validation.enable": "true",
    "validation.dataset": "stdlib",
    "validation.freq": 1,
    "validation.steps": 1,
    "numerics.statistics_freq": 1,
}
POSITIONS = 8 * 16
"""Of the global batch."""
COUNTED = {"blocks": 4, "counts": True}
SETTINGS: dict[str, object] = {"training.steps": 3, "training.global_batch_size": 8, "lr_scheduler.warmup_steps": 1}


class Poisons:
    """Makes the loss of a step NaN, behind all modules that count."""

    def __init__(self, step: int) -> None:
        self.poisoned = step

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        self.weight = run.parts[0].module.get_parameter("norm.weight")

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        self.step, self.before = step, self.weight.detach().clone()
        if step == self.poisoned:
            self.weight.data.fill_(float("nan"))

    @hookimpl
    def titan_before_update(self) -> None:
        self.weight.data.copy_(self.before)


@dataclass
class Repeats:
    """Repeats each step, as observers do, and lets the device skip the updates of some steps."""

    skips: tuple[int, ...] = ()

    @hookimpl
    def titan_before_update(self, update: PendingUpdate) -> Tensor:
        update.repeat_forward()
        with update.repeat_backward():
            pass
        return tensor(update.step in self.skips)


def train(folder: str, overrides: dict[str, object], *observers: object) -> RunRecord:
    return train_model(folder, small(**COUNTED), {**SETTINGS, **overrides}, observers)


@pytest.fixture(scope="module")
def one_device(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    (record,) = gloo.run(1, train, str(tmp_path_factory.mktemp("one")), ACCUMULATION[1])
    assert [set(step) for step in record.statistics] == [{"inside", "outside", "features"}] * 3
    for step in record.statistics:
        assert [sum(layer) for layer in (*step["inside"], *step["outside"])] == [POSITIONS] * 8
    return record


def case(ranks: int, overrides: dict[str, object], quick: bool = False) -> Any:
    return pytest.param(ranks, overrides, id=f"{overrides}", marks=() if quick else pytest.mark.full)


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        case(1, {}, quick=True),
        case(1, {MODE: "full"}),
        case(1, {MODE: "selective"}),
        case(1, {MODE: "full", "compile.enable": "true", "compile.fullgraph": "false"}),
        case(2, {"training.local_batch_size": 4}),  # FSDP, one microbatch
        case(2, {"training.local_batch_size": 1, MODE: "full"}),
        case(4, {DR: 2}),
        case(2, {TP: 2, MODE: "selective"}, quick=True),
        case(2, {TP: 2, NO_SP: "true"}, quick=True),
        case(2, {CP: 2}),
        case(4, {CP: 2, TP: 2, MODE: "full"}),
        case(2, {PP: 2, SCHEDULE: "1F1B", MODE: "full"}),
        case(2, {PP: 2, SCHEDULE: "ZBVZeroBubble"}, quick=True),
        case(2, {PP: 2, SCHEDULE: "DualPipeV"}),
    ],
)
def test_counts_are_those_of_one_device(
    gloo: GlooPool, one_device: RunRecord, tmp_path: Path, ranks: int, overrides: dict[str, object]
) -> None:
    for record in gloo.run(ranks, train, str(tmp_path), overrides):
        assert record.statistics == one_device.statistics
        assert record.losses == pytest.approx(one_device.losses, rel=1e-6)


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [case(1, {MODE: "full"}, quick=True), case(2, {TP: 2}), case(2, {PP: 2, SCHEDULE: "ZBVZeroBubble"})],
)
def test_modules_before_the_first_trained_parameter_count(
    gloo: GlooPool, one_device: RunRecord, tmp_path: Path, ranks: int, overrides: dict[str, object]
) -> None:
    frozen = {"training.freeze": '["embedding.*", "blocks.[01].*"]'}
    for record in gloo.run(ranks, train, str(tmp_path), {**frozen, **overrides}):
        assert record.statistics[0] == one_device.statistics[0]
        for step in record.statistics:
            assert [sum(layer) for layer in (*step["inside"], *step["outside"])] == [POSITIONS] * 8


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        case(1, {}, quick=True),
        case(2, {TP: 2}),
        case(2, {PP: 2, SCHEDULE: "ZBVZeroBubble"}),
        case(2, {PP: 2, SCHEDULE: "1F1B", MODE: "full"}),
    ],
)
def test_validation_and_observers_that_repeat_steps_do_not_count(
    gloo: GlooPool, one_device: RunRecord, tmp_path: Path, ranks: int, overrides: dict[str, object]
) -> None:
    for record in gloo.run(ranks, train, str(tmp_path), {**overrides, **VALIDATION}, Repeats()):
        assert record.statistics == one_device.statistics
        assert len(record.validation) == 3


def test_a_step_in_which_the_origin_of_a_nan_is_located_counts_once(
    gloo: GlooPool, one_device: RunRecord, tmp_path: Path
) -> None:
    (record,) = gloo.run(1, train, str(tmp_path), {"training.on_nan": "skip"}, Poisons(2))
    assert record.skipped == [2] and math.isnan(record.losses[1])
    assert record.statistics[:2] == one_device.statistics[:2]
    events = (tmp_path / "outputs/tiny/events.jsonl").read_text()
    assert "the first output that is not finite is that of norm" in events


def test_a_step_that_the_device_skips_counts_and_says_so(gloo: GlooPool, one_device: RunRecord, tmp_path: Path) -> None:
    (record,) = gloo.run(1, train, str(tmp_path), {}, Repeats(skips=(2,)))
    assert record.skipped == [2]
    assert record.statistics[:2] == one_device.statistics[:2]
    assert [sum(layer) for layer in record.statistics[2]["outside"]] == [POSITIONS] * 4
    assert record.statistics[2] != one_device.statistics[2]  # the weights are those of the step before
