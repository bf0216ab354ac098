"""``titan compare``: variants, their summaries, and the reports of mistakes and failures."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from titan_core.api.errors import UserError
from titan_core.api.runs.run_log import RunLog
from titan_core.cli.main import main
from titan_report.compare.outcome import csv_rows_of, outcome_of, rows_of
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
    assert first.memory_gib == 3.0
    second = outcome_of([run({1: 1.0, 8: 1.0, 16: 260.0}, loss=None)], after=4)
    outcomes = [("base", first), ("broken", None), ("other", second)]
    rows = rows_of(outcomes)
    assert rows[0][:3] == ("base", "130", "1.000")
    assert rows[1][:2] == ("broken", "failed")
    assert rows[2][:3] == ("other", "260", "2.000") and rows[2][-1] == "nan"
    assert csv_rows_of(outcomes)[3][1:3] == (260.0, 2.0)


@pytest.mark.full
def test_a_comparison(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs two rounds. A variant that fails during training is reported, and the others still run."""
    variants = ["--vary", "optimizer.lr=1e-3,100", "--optimizer.weight_decay", "100", "--training.max_norm", "0"]
    variants += ["--steps", "10", "--rounds", "2"]
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
    assert "tiny debug: 10 steps on 1 process(es)" in page


def test_a_mistake_in_a_variant_is_reported_before_anything_is_trained(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "tiny", "--vary", "training.seq_len=32,99999", *TINY]) == 2
    printed = capsys.readouterr()
    assert "variant 'seq_len=99999': " in printed.err and "steps, in" not in printed.out
