"""``titan verify``: the comparison of runs, and mistakes in its arguments."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from titan_core.api import UserError
from titan_core.api.parallel.mesh import STANDARD_DIMS
from titan_core.cli.main import main
from titan_debug.numerics.statistics import Moments, StepStatistics, read_statistics
from titan_debug.verify.curves import Curve, compare
from titan_debug.verify.meshes import parse_mesh
from titan_testing.jobs import run_recipe

TINY = [
    "--model.args", "{dim = 32, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 64}",
    "--training.seq_len", "32", "--training.local_batch_size", "4", "--training.global_batch_size", "4",
]  # fmt: skip


def moments(rms: float, mean: float = 0.0) -> Moments:
    return Moments(100, 100 * mean, 100 * rms**2, rms, 0)


def curve(
    loss: float = 2.0, output: float = 1.0, gradient: float = 1.0, mean: float = 0.0, zero: float = 0.0, norm: float = 1.0
) -> Curve:
    steps = {
        step: StepStatistics(
            {"first": moments(1.0), "second": moments(output, mean)},
            {"first.weight": moments(gradient), "key.bias": moments(zero), "norm": moments(1.0)},
        )
        for step in (1, 2)
    }
    return Curve({1: 3.0, 2: loss}, {1: 1.0, 2: norm}, steps)


@pytest.mark.parametrize(
    ("other", "where"),
    [
        (curve(), None),
        (curve(loss=2.0001, output=1.0005), None),
        (curve(loss=2.001), "step 2 in the loss: loss 2.001 instead of 2 (difference 5.0e-04, allowed 1.0e-04)"),
        (curve(loss=float("nan")), "step 2 in the loss: loss nan instead of 2"),
        (
            curve(loss=2.001, output=1.01),
            "step 1 in the output of second: rms 1.01 instead of 1 (difference 1.0e-02, allowed 1.0e-03)",
        ),
        (curve(mean=0.01), "step 1 in the output of second: mean 0.01 instead of 0"),
        (curve(gradient=0.0), "step 1 in the gradient of first.weight: rms 0 instead of 1"),
        (curve(zero=5e-7), None),  # zero except for rounding errors
        (curve(zero=5e-3), "step 1 in the gradient of key.bias: rms 0.005 instead of 0"),
        (curve(norm=1.0005), None),
        (curve(norm=1.01), "step 2 in the gradient norm: norm 1.01 instead of 1 (difference 1.0e-02, allowed 1.0e-03)"),
        (curve(norm=float("nan")), "step 2 in the gradient norm: norm nan instead of 1"),
    ],
)
def test_the_first_difference_beyond_the_tolerance_is_reported(other: Curve, where: str | None) -> None:
    departure = compare(curve(), other, 1e-4).departure
    assert departure is None if where is None else str(departure).startswith(where)


def test_of_two_gradients_that_differ_the_first_in_the_order_of_backward_is_reported() -> None:
    other = curve(gradient=0.0)
    for step in other.statistics.values():
        step.gradients["norm"] = moments(3.0)  # the model's last module
    assert str(compare(curve(), other, 1e-4).departure).startswith("step 1 in the gradient of norm: rms 3 instead of 1")


def test_the_largest_difference_of_gradients_is_reported_with_its_parameter() -> None:
    verdict = compare(curve(), curve(gradient=1.0005, zero=2e-7), 1e-4)
    assert verdict.departure is None
    assert (round(verdict.gradient_difference, 7), verdict.gradient) == (5e-4, "first.weight")
    assert compare(curve(), curve(gradient=math.nan, mean=1.0), 1e-4).gradient == "first.weight"
    none = Curve({1: 3.0}, {1: 1.0}, {})
    assert math.isnan(compare(none, none, 1e-4).gradient_difference)


def test_a_missing_gradient_is_reported() -> None:
    other = curve()
    for step in other.statistics.values():
        step.gradients.pop("norm")
    assert str(compare(curve(), other, 1e-4).departure).startswith("step 1 in the gradient of norm: rms 0 instead of 1")


def test_a_run_that_ended_before_the_reference_is_reported() -> None:
    verdict = compare(curve(), Curve({1: 3.0}, {1: 1.0}, curve().statistics), 1e-4)
    assert verdict.tolerance == 1e-4
    assert str(verdict.departure).startswith("step 2 in the loss: loss nan instead of 2")
    assert verdict.loss_difference != verdict.loss_difference


def test_totals_are_nan_if_a_part_is() -> None:
    parts = [Moments(1, 2.0, 4.0, 2.0, 0), Moments(1, math.nan, math.nan, 2.0, 1)]
    total = Moments.total(parts)
    assert math.isnan(total.mean) and math.isnan(total.rms) and (total.count, total.not_finite) == (2, 1)
    assert Moments.total(parts[:1] * 3) == Moments(3, 6.0, 12.0, 2.0, 0)


def test_statistics_of_a_step_that_fewer_ranks_repeated(tmp_path: Path) -> None:
    def line(step: int, attempt: float, value: float) -> str:
        outputs = {"b": [10, 10 * value, 10 * value**2, value, 0], "a": [10, 0.0, 0.0, 0.0, 0]}
        places = {"a": [1, 0], "b": [1, 7], "w": [0, 0]}
        gradients = {"w": [1, None, None, None, 1]}
        record = {"step": step, "attempt": attempt, "places": places, "outputs": outputs, "gradients": gradients}
        return json.dumps(record) + "\n"

    for rank in range(4):
        again = [line(2, 200.0, 1.0)] if rank < 2 else []
        (tmp_path / f"rank-{rank}.jsonl").write_text("".join([line(1, 100.0, 1.0), line(2, 100.0, 5.0), *again]) + '{"to')
    first, second = read_statistics(tmp_path).values()
    assert list(first.outputs) == ["a", "b"]  # in the model's order
    assert (first.outputs["b"].count, second.outputs["b"].count) == (40, 20)
    assert second.outputs["b"].abs_max == 1.0
    assert second.gradients["w"].not_finite == 2 and math.isnan(second.gradients["w"].rms)


def test_statistics_that_cannot_be_written_do_not_end_the_run(in_tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {option.removeprefix("--"): value for option, value in zip(TINY[::2], TINY[1::2], strict=True)}
    settings = {
        **given, "training.steps": 2, "numerics.statistics_freq": 1, "job.dump_folder": "run",
        "numerics.save_statistics_folder": "config.toml",
    }  # fmt: skip
    assert run_recipe("tiny", settings).reason == "all steps are done"
    assert re.search(r"rank-0\.jsonl cannot be written: (Not a directory|File exists)", caplog.text)


@pytest.mark.parametrize("text", ["-1", "nan", "much"])
def test_invalid_tolerances(in_tmp: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert main(["verify", "tiny", "--mesh", "tp=2", f"--tolerance={text}", *TINY]) == 2
    assert "is not a relative difference from 0 to 1000000" in capsys.readouterr().err


def test_a_certificate_that_cannot_be_written_is_refused_before_any_training(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").touch()
    assert main(["verify", "tiny", "--mesh", "tp=2", *TINY, "--certificate", "file/certificate.json"]) == 2
    assert re.search(r"file/certificate\.json: cannot be written: (Not a directory|File exists)", capsys.readouterr().err)
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("dp_shrad=2", "unknown mesh dimension 'dp_shrad'; did you mean 'dp_shard'"),
        ("tp", "the degree in 'tp' must be a whole number"),
        ("tp=0", "the degree in 'tp=0' must be"),
        ("tp=2,tp=2", "repeats the dimension 'tp'; remove one"),
    ],
)
def test_mistakes(mesh: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_mesh(mesh, STANDARD_DIMS)
