"""``titan compare``: variants, their summaries, and the reports of mistakes and failures."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from titan_core.api import UserError
from titan_core.cli.main import main
from titan_core.plugins.discovery import discover
from titan_core.plugins.registry import Components
from titan_core.toolkit.runs.run_log import RunLog
from titan_report.compare.outcome import csv_rows_of, loss_difference, outcome_of, purpose_of, rows_of, speed_up
from titan_report.compare.variants import folders_of, split, variants_of

TINY = [
    "--model.args", "{dim = 32, n_layers = 2, n_heads = 2, n_kv_heads = 1, ffn_dim = 64}",
    "--training.seq_len", "32", "--training.local_batch_size", "2", "--training.global_batch_size", "4",
]  # fmt: skip


def test_variants_are_all_combinations() -> None:
    names = [variant.name for variant in variants_of(["optimizer.lr=1e-3,2e-3", "compile.enable=false,true"], [])]
    assert names == [
        "lr=1e-3, compile.enable=false", "lr=1e-3, compile.enable=true",
        "lr=2e-3, compile.enable=false", "lr=2e-3, compile.enable=true",
    ]  # fmt: skip


def test_a_variant_is_compared_with_the_unchanged_recipe() -> None:
    unchanged, fast = variants_of([], ["compile.enable=true float8.filter_fqns=['a b', 'c']"])
    assert (unchanged.name, unchanged.overrides) == ("baseline", ())
    assert [(override.key, override.text) for override in fast.overrides] == [
        ("compile.enable", "true"),
        ("float8.filter_fqns", "['a b', 'c']"),
    ]


def test_names_and_folders_of_variants_are_unique() -> None:
    names = [variant.name for variant in variants_of([], ["data.interval=10", "checkpoint.interval=10"])]
    assert names == ["baseline", "data.interval=10", "checkpoint.interval=10"]
    variants = variants_of(["job.description=/x/a b,/x/a_b," + "y" * 300], [])
    ((*folders,),) = folders_of(variants, Path("out"), 1)
    assert len(set(folders)) == 3 and all(folder.parent == Path("out") and len(folder.name) < 100 for folder in folders)


def test_separators_within_brackets_and_quotes_are_ignored() -> None:
    assert split('a,[1, 2],"x,y",{k = "v,w"}', ",") == ["a", "[1, 2]", '"x,y"', '{k = "v,w"}']


@pytest.mark.parametrize(
    ("vary", "variant", "message"),
    [
        ([], [], "there is nothing to compare"),
        (["lr=1,2"], [], "not a key with its values"),
        (["optimizer.lr="], [], "has no values"),
        (["optimizer.lr=1"], [], "defines only one variant"),
        (["optimizer.lr=1,1"], [], "appears twice"),
        ([], ["optimizer.lr"], "needs a value"),
        ([], [""], "changes nothing"),
    ],
)
def test_mistakes(vary: list[str], variant: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        variants_of(vary, variant)


def run(speeds: dict[int, float], loss: float | None = 2.0, memory: float = 1.0) -> RunLog:
    lines: list[dict[str, Any]] = [
        {
            "step": step,
            "loss": loss,
            "tokens_per_second": speed,
            "step_seconds": 1 / speed,
            "mfu": 0.5,
            "memory_peak_gib": memory,
        }
        for step, speed in speeds.items()
    ]
    return RunLog(Path("run"), {}, [], lines, [], [])


def test_speed_is_a_median_over_runs_without_their_warmup() -> None:
    # The window that ends at step 8 begins after step 4.
    first = outcome_of([run({1: 1.0, 4: 2.0, 8: 100.0, 12: 120.0, 16: 110.0}, memory=3.0), run({1: 1, 8: 150.0})], after=4)
    assert first.tokens_per_second == (110.0 + 150.0) / 2  # the second run has no such window: its last one counts
    second = outcome_of([run({1: 1.0, 8: 1.0, 16: 260.0}, loss=None)], after=4)
    outcomes = [("base", first), ("broken", None), ("other", second)]
    rows = rows_of(outcomes, "speed")
    assert rows[0][:3] == ("base", "130", "1") and rows[0][5] == "3.00"
    assert rows[1][:2] == ("broken", "failed") and len(rows[1]) == len(rows[0])
    assert rows[2][:3] == ("other", "260", "2.364 (noise unknown)") and rows[2][-1] == "nan"  # of runs of one round
    assert csv_rows_of(outcomes)[3][2:4] == (260.0, 260 / 110)


def steady(speed: float, jitter: float = 0.0, loss: float = 2.0) -> RunLog:
    return run({step: speed * (1 + jitter * (step % 3 - 1)) for step in range(1, 9)}, loss)


@pytest.mark.parametrize(
    ("base", "other", "noise"),
    [
        ([steady(100.0, 0.1)], [steady(104.0, 0.1)], True),  # within the variation of one run
        ([steady(100.0, 0.001)], [steady(104.0, 0.001)], False),
        ([steady(100.0), steady(90.0), steady(110.0)], [steady(104.0), steady(93.6), steady(114.4)], False),
        ([steady(100.0), steady(90.0), steady(110.0)], [steady(104.0), steady(88.0), steady(113.0)], True),
    ],
)
def test_no_difference_within_noise_is_called_a_speed_up(base: list[RunLog], other: list[RunLog], noise: bool) -> None:
    outcomes = [("base", outcome_of(base, 0)), ("other", outcome_of(other, 0))]
    assert speed_up(outcomes[1][1], outcomes[0][1]).within_noise is noise
    assert ("(within noise)" in rows_of(outcomes, "speed")[1][2]) is noise  # type: ignore[arg-type]


def test_a_confidence_interval() -> None:
    """By hand: ratios 1.04, 1.05 and 1.03 have a standard error of 0.01 / sqrt(3), and t(2) is 4.30."""
    found = speed_up(outcome_of([steady(speed) for speed in (104.0, 105.0, 103.0)], 0), outcome_of([steady(100.0)] * 3, 0))
    assert found.value == pytest.approx(1.04) and found.noise == pytest.approx(4.30 * 0.01 / 3**0.5)


def test_losses_are_compared_by_seed() -> None:
    base = outcome_of([steady(1.0, loss=loss) for loss in (2.0, 3.0, 4.0)], 0)
    better = outcome_of([steady(1.0, loss=loss) for loss in (1.9, 2.91, 3.89)], 0)
    difference = loss_difference(better, base)
    assert difference is not None and difference.value == pytest.approx(-0.1) and not difference.within_noise
    rows = rows_of([("base", base), ("better", better)], "loss")
    assert rows[0][1:3] == ("3.0000 ± 1.0000", "–")
    assert rows[1][2].startswith("-0.1000 ± 0.02")
    alone = outcome_of([steady(1.0, loss=1.9)], 0)
    assert rows_of([("base", base), ("alone", alone)], "loss")[1][2] == "-0.1000 (noise unknown)"


def test_the_final_loss_is_a_mean_over_the_last_tenth() -> None:
    log = run(dict.fromkeys(range(1, 101), 1.0))
    for record in log.steps:
        record["loss"] = float(record["step"])
    assert outcome_of([log], 0).final_loss == pytest.approx(95.5)
    log.steps[-1]["loss"] = None
    assert outcome_of([log], 0).final_loss is None


@pytest.mark.parametrize(
    ("keys", "purpose"),
    [
        ({"metrics.log_freq", "comm.flight_recorder"}, "speed"),
        ({"parallelism.tensor_parallel_degree", "training.local_batch_size"}, "speed"),
        ({"optimizer.implementation", "data.num_workers", "job.device"}, "speed"),
        ({"optimizer.lr"}, "loss"),
        ({"optimizer.lr", "job.device"}, "loss"),
        ({"training.seq_len"}, "loss"),
        ({"model.args.dim"}, "loss"),
        ({"muon.momentum"}, "loss"),
    ],
)
def test_what_a_comparison_measures(keys: set[str], purpose: str) -> None:
    assert purpose_of(keys, Components(discover())) == purpose


@pytest.mark.full
def test_a_comparison(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs two rounds. A variant that fails during training is reported, and the others still run."""
    variants = ["--vary", "optimizer.lr=1e-3,100", "--optimizer.weight_decay", "100", "--training.max_norm", "0"]
    variants += ["--measure", "speed", "--steps", "10", "--rounds", "2"]
    assert main(["compare", "tiny", *variants, *TINY]) == 1
    printed = capsys.readouterr()
    order = [line.partition(":")[0] for line in printed.out.splitlines() if "steps, in" in line]
    assert order == ["lr=1e-3", "lr=100", "lr=1e-3"]  # the failed variant does not run again
    rows = list(csv.DictReader((in_tmp / "outputs/compare/tiny/comparison.csv").open()))
    assert [row["variant"] for row in rows] == ["lr=1e-3", "lr=100"]
    assert float(rows[0]["tokens_per_second"]) > 0 and float(rows[0]["speed_up"]) == 1.0
    assert 4.0 < float(rows[0]["final_loss"]) < 7.0
    assert rows[1]["tokens_per_second"] == "" and "lr=100" in printed.err and "nan" in printed.err
    page = (in_tmp / "outputs/compare/tiny/report.html").read_text()
    assert re.search(r"tiny debug \(\d+\.\dK parameters\): 10 steps on 1 process\(es\), 2 rounds", page)


@pytest.mark.full
def test_a_comparison_of_losses(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It follows the whole recipe, and each round has a seed of its own."""
    arguments = ["--vary", "optimizer.lr=1e-3,1e-2", "--rounds", "2", "--training.steps", "6", "--training.seed", "5"]
    assert main(["compare", "tiny", *arguments, *TINY]) == 0
    printed = capsys.readouterr().out
    assert "comparing losses after 6 steps" in printed and printed.count("6 steps, in") == 4
    folder = in_tmp / "outputs/compare/tiny"
    seeds = [RunLog.read(folder / f"round-{n}" / "lr=1e-3").config["training"]["seed"] for n in (1, 2)]
    assert seeds == [5, 6]
    rows = list(csv.DictReader((folder / "comparison.csv").open()))
    assert [row["runs"] for row in rows] == ["2", "2"] and float(rows[1]["loss_difference_noise"]) > 0


def test_a_mistake_in_a_variant_is_reported_before_anything_is_trained(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "tiny", "--vary", "training.seq_len=32,99999", *TINY]) == 2
    printed = capsys.readouterr()
    assert "variant 'seq_len=99999': " in printed.err and "steps, in" not in printed.out
