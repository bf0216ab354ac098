"""A run on one device: its steps, its files and its end."""

from __future__ import annotations

import json
import math
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from titan_core.api import Batch, UserError, hookimpl
from titan_core.api.training.batch import IGNORE
from titan_core.cli.main import main
from titan_core.data import batches
from titan_core.loop.finite_guard import NonFiniteError
from titan_core.loop.lookahead import Lookahead
from titan_core.loop.training import train
from titan_core.toolkit.errors import EXIT_NUMERICS
from titan_testing.jobs import TINY, JobRecorder, make_job, run_recipe


def test_a_run_from_start_to_end(in_tmp: Path) -> None:
    record = run_recipe("tiny", TINY)
    steps = [f"{event} {step}" for step in range(1, 5) for event in ("step_start", "step_end")]
    assert record.events == ["job_assembled", "train_start", *steps, "train_end"]
    assert record.reason == "all steps are done"
    folder = in_tmp / "outputs" / "tiny"
    assert sorted(file.name for file in folder.iterdir()) == ["config.toml", "events.jsonl", "metrics.jsonl", "plugins.json"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 4]
    assert [line["loss"] for line in lines] == pytest.approx([record.losses[0], record.losses[1], record.losses[3]])
    assert {"grad_norm", "lr", "tokens_per_second", "memory_peak_gib", "data_seconds"} <= set(lines[0])
    assert lines[-1]["tokens_seen"] == 4 * 4 * 32
    assert {plugin["distribution"] for plugin in json.loads((folder / "plugins.json").read_text())} >= {"titan-core"}


def test_the_written_config_repeats_the_run(in_tmp: Path) -> None:
    first = run_recipe("tiny", TINY)
    again = run_recipe("outputs/tiny/config.toml")
    assert again.losses == first.losses


def test_deterministic_runs_repeat_bit_for_bit(in_tmp: Path) -> None:
    try:
        runs = [run_recipe("tiny", {**TINY, "training.deterministic": "true"}, weights=True) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert runs[0].losses == runs[1].losses
    assert all(torch.equal(runs[0].final[name], tensor) for name, tensor in runs[1].final.items())


def test_accumulation_does_not_change_the_loss(in_tmp: Path) -> None:
    runs = [run_recipe("tiny", {**TINY, "training.local_batch_size": size}) for size in (1, 4)]
    assert runs[0].losses == pytest.approx(runs[1].losses, rel=1e-6)
    assert runs[0].grad_norms == pytest.approx(runs[1].grad_norms, rel=1e-5)


def test_a_norm_limit_of_0_does_not_clip(in_tmp: Path) -> None:
    runs = [run_recipe("tiny", {**TINY, "training.max_norm": limit}) for limit in (0, 1e6)]
    assert runs[0].losses == runs[1].losses


def test_a_loss_that_is_not_finite_stops_the_run(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = {**TINY, "optimizer.lr": 100, "optimizer.weight_decay": 100, "training.max_norm": 0, "training.steps": 50}
    recorder = JobRecorder(weights=False)
    with pytest.raises(NonFiniteError, match=r"step \d+: .* nan; training stops.*Lower optimizer\.lr"):
        train(make_job("tiny", overrides), [recorder])
    assert recorder.record.events[-2:] == ["exception NonFiniteError", "train_end"]
    arguments = [text for key, value in overrides.items() for text in (f"--{key}", str(value))]
    assert main(["train", "tiny", *arguments]) == EXIT_NUMERICS
    assert re.search(r"^titan: stopped: step \d+: .* nan; training stops", capsys.readouterr().err, re.MULTILINE)
    record = run_recipe("tiny", {**overrides, "training.on_nan": "ignore"})
    assert math.isnan(record.losses[-1])
    last = (in_tmp / "outputs/tiny/metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["loss"] is None


def test_data_that_ends_stops_the_run_cleanly(in_tmp: Path) -> None:
    data = {"training.dataset": "letters", "training.dataset_path": ",".join(["110"] * 8)}
    record = run_recipe("tiny", {**TINY, **data, "data.on_end": "stop", "training.steps": 50})
    assert record.reason == "the dataset has ended"
    assert 2 <= len(record.losses) < 50
    assert len(run_recipe("tiny", {**TINY, **data, "training.steps": 20}).losses) == 20


def test_a_pattern_that_matches_no_parameter_is_refused(in_tmp: Path) -> None:
    overrides = {**TINY, "optimizer.param_groups": '[{pattern = "*nrom*", weight_decay = 0.0}]'}
    with pytest.raises(UserError, match=r'param_groups = "\*nrom\*": the pattern matches no parameter'):
        train(make_job("tiny", overrides))


def test_a_replica_without_a_target_in_a_step_learns_nothing(monkeypatch: pytest.MonkeyPatch, in_tmp: Path) -> None:
    """With diverging replicas (local SGD), one replica may have all targets of a batch. The other's loss is 0, not 0 / 0."""
    look, batch = Lookahead.take, batches._batch

    def without_targets(rows: Any, weights: Any, lengths: Any, document_mask: bool) -> Batch:
        made = batch(rows, weights, lengths, document_mask)
        return replace(made, targets=torch.full_like(made.targets, IGNORE))

    monkeypatch.setattr(batches, "_batch", without_targets)
    monkeypatch.setattr(
        Lookahead, "take", lambda self: replace(look(self), num_targets=100, weight=100.0, replica_weight=0.0)
    )
    record = run_recipe("tiny", {**TINY, "training.steps": 1, "optimizer.weight_decay": 0.0}, weights=True)
    assert record.losses == [0.0]
    assert record.grad_norms == [0.0]
    assert all(torch.equal(record.initial[name], final) for name, final in record.final.items())


def test_a_dataset_of_empty_texts_is_an_error_and_not_a_loss_of_zero(in_tmp: Path) -> None:
    settings = {**TINY, "training.dataset": "letters"}
    with pytest.raises(UserError, match=r"dataset 'letters': all \d+ documents of logical shard .* are empty; check data"):
        run_recipe("tiny", {**settings, "training.dataset_path": ",".join(["0"] * 20)})
    run_recipe("tiny", {**settings, "training.dataset_path": ",".join(["0", "30"] * 10), "job.dump_folder": "some"})
    last = json.loads((in_tmp / "some/metrics.jsonl").read_text().splitlines()[-1])
    assert last["empty_documents"] > 0
    assert last["corrupt_records"] == 0


class LeavesOutTheFirst:
    """Skips the first update."""

    @hookimpl
    def titan_before_update(self, update: Any) -> bool:
        warnings.warn("an observer's own", UserWarning, stacklevel=1)
        return bool(update.step == 1)


def test_skipping_the_first_update_causes_no_warning(in_tmp: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record = run_recipe("tiny", {**TINY, "training.steps": 2}, observers=[LeavesOutTheFirst()])
    assert record.skipped == [1]
    ours = [warning for warning in caught if "lr_scheduler" in str(warning.message)]
    assert not ours, ours[0].message
    assert sum("an observer's own" in str(warning.message) for warning in caught) == 2
