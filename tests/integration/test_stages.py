"""A run of several stages: equal to one device without an interruption, wherever it was stopped and on whatever mesh it went
on, and to jobs that are started by hand with the values of each stage."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.quick import rows
from harness.staged import RECIPE, run_staged, write_recipe
from titan_core.api import UserError, hookimpl
from titan_core.job.stages import job_of_stage
from titan_core.toolkit.runs.run_log import RunLog
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, make_job
from titan_testing.meshes import CP, DR, PP, TP

MESHES: dict[str, tuple[int, dict[str, object]]] = {
    "FSDP 2": (2, {}),
    "DDP 2": (2, {DR: 2}),
    "TP 2": (2, {TP: 2}),
    "CP 2": (2, {CP: 2}),
    "TP 2 x PP 2": (4, {TP: 2, PP: 2}),
}
BY_HAND = [
    {"training.stop_at_step": 4},
    {
        "training.stop_at_step": 8,
        "training.seq_len": 64,
        "training.local_batch_size": 1,
        "training.global_batch_size": 4,
        "model.args.rope_theta": 50000.0,
    },
    {
        "training.seq_len": 64,
        "training.local_batch_size": 1,
        "training.global_batch_size": 8,
        "model.args.rope_theta": 50000.0,
        "lr_scheduler.min_lr_factor": 0.2,
        "data.mixture": '[{name = "books", dataset = "json", dataset_path = "books.jsonl"}, '
        '{name = "web", dataset = "json", dataset_path = "web.jsonl"}]',
    },
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, gloo: GlooPool) -> tuple[Path, RunRecord]:
    """The uninterrupted run on one device."""
    folder = tmp_path_factory.mktemp("whole")
    write_recipe(folder)
    return folder, gloo.run(1, run_staged, str(folder), {})[0]


def require_equal(parts: list[RunRecord], whole: RunRecord) -> None:
    losses = [loss for part in parts for loss in part.losses]
    assert losses == pytest.approx(whole.losses, rel=1e-6) and len(losses) == 12
    assert [rate for part in parts for rate in part.learning_rates] == whole.learning_rates
    assert [count for part in parts for count in part.targets] == whole.targets
    for name, tensor in parts[-1].final.items():
        torch.testing.assert_close(tensor, whole.final[name], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", rows(MESHES, ["FSDP 2"]))
def test_stages_on_a_mesh(gloo: GlooPool, tmp_path: Path, whole: tuple[Path, RunRecord], name: str) -> None:
    write_recipe(tmp_path)
    ranks, mesh = MESHES[name]
    require_equal(gloo.run(ranks, run_staged, str(tmp_path), mesh)[:1], whole[1])


@pytest.mark.parametrize("stops", [(2, 4, 6), pytest.param((3, 8, 11), marks=pytest.mark.full)], ids=str)
def test_stages_resume_on_another_mesh(
    gloo: GlooPool, tmp_path: Path, whole: tuple[Path, RunRecord], stops: tuple[int, ...]
) -> None:
    """Stopped within each stage and where one ends."""
    write_recipe(tmp_path)
    parts = []
    meshes = [(1, {}), MESHES["FSDP 2"], MESHES["TP 2"], MESHES["CP 2"]]
    for stop, (ranks, mesh) in zip((*stops, None), meshes, strict=True):
        settings = {**mesh, **({"training.stop_at_step": stop} if stop is not None else {})}
        parts.append(gloo.run(ranks, run_staged, str(tmp_path), settings)[0])
    require_equal(parts, whole[1])


@pytest.mark.full
def test_a_failed_step_of_a_later_stage_is_trained_again(
    gloo: GlooPool, tmp_path: Path, whole: tuple[Path, RunRecord]
) -> None:
    write_recipe(tmp_path)
    with pytest.raises(RuntimeError, match="planted"):
        gloo.run(2, run_staged, str(tmp_path), {}, (Failing(7),))
    (again, _) = gloo.run(2, run_staged, str(tmp_path), {})
    assert again.losses == pytest.approx(whole[1].losses[4:], rel=1e-6)


class Failing:
    """Fails in a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        if step == self._step:
            raise RuntimeError("planted")


def test_stages_are_jobs_with_their_values(gloo: GlooPool, tmp_path: Path, whole: tuple[Path, RunRecord]) -> None:
    """The same run as three jobs, whose changes are named in ``checkpoint.allow_changed``: equal to the bit."""
    write_recipe(tmp_path, RECIPE.partition("[[stages]]")[0])
    losses: list[float] = []
    for number, values in enumerate(BY_HAND):
        settings: dict[str, object] = {**values, "data.logical_shards": 4}
        if number:
            settings["checkpoint.allow_changed"] = json.dumps([*values, "dataset.*.weight"])
        losses += gloo.run(1, run_staged, str(tmp_path), settings)[0].losses
    assert losses == whole[1].losses


def test_each_source_has_its_share_of_each_stage(whole: tuple[Path, RunRecord]) -> None:
    """Sequences by source, from the targets that the log counts for each; every target is a token of one source."""
    folder, record = whole
    last = list(RunLog.read_metrics(folder / "outputs" / "staged"))[-1]
    counted = {name: last[f"tokens_seen/{name}"] for name in ("web", "code", "books")}
    assert sum(counted.values()) == sum(record.targets)
    wanted = {"web": (8 * 32 * 4 + 4 * 64 * 4) * 0.75 + 8 * 64 * 4 / 2, "code": 512, "books": 1024}
    for name, tokens in wanted.items():
        assert abs(counted[name] - tokens) <= 2 * 64


def test_the_run_has_one_log_that_names_its_stages(whole: tuple[Path, RunRecord]) -> None:
    folder = whole[0] / "outputs" / "staged"
    starts = [event for event in RunLog.read_events(folder) if event["event"] == "start"]
    assert [(event["stage"], event["step"]) for event in starts] == [("1", 0), ("long", 4), ("anneal", 8)]
    ends = [event["reason"] for event in RunLog.read_events(folder) if event["event"] == "end"]
    assert ends == ["stage '1' is complete", "stage 'long' is complete", "all steps are done"]
    assert [record["step"] for record in RunLog.read_metrics(folder) if "loss" in record] == [1, 4, 8, 12]


def test_the_config_that_a_run_writes_has_its_stages(in_tmp: Path) -> None:
    write_recipe(in_tmp)
    job = make_job("staged.toml")
    assert [(stage.name, stage.first_step) for stage in job.stages] == [("1", 0), ("long", 4), ("anneal", 8)]
    assert [job_of_stage(job, number).batch.tokens_per_step for number in range(3)] == [256, 256, 512]
    assert [job.tokens_before(step) for step in (0, 4, 5, 8, 12)] == [0, 1024, 1280, 2048, 4096]
    assert job.data.plan.logical_shards == 4


MISTAKES: dict[str, tuple[str, str, str]] = {
    "no begin": ("at_step = 4\n", "", "needs one of at_step and at_tokens"),
    "two begins": ("at_step = 4\n", "at_step = 4\nat_tokens = 9\n", "needs one of at_step and at_tokens"),
    "order": ("at_step = 4\n", "at_step = 9\n", "begins after step .*before it after step 9"),
    "name": ('name = "anneal"', 'name = "long"', "another stage has this name"),
    "key": ("[stages.training]\nseq_len = 64", "[stages.training]\nseqlen = 64", "stage 'long': .*unknown key"),
    "section": ("[stages.training]\nseq_len", "[stages.trainig]\nseq_len", "stage 'long': .*trainig"),
    "fixed": ("[stages.training]\nseq_len = 64", "[stages.training]\nseed = 1", "cannot change during a run"),
    "tokens": ("[stages.model.args]\n", '[stages.model]\ntokenizer = "byte"\n[stages.model.args]\n', "keep their meaning"),
    "weights": ("rope_theta = 50000.0", "n_layers = 3", "all stages train the same weights"),
    "batch": ("local_batch_size = 1\nglobal", "local_batch_size = 3\nglobal", "stage 'long': .*must be a multiple"),
    "data": ('path = "books.jsonl"', 'path = "book.jsonl"', "stage 'anneal': .*book.jsonl"),
    "one name": ('name = "books"\ndataset = "json"\ndataset_path = "books.jsonl"',
                 'name = "code"\ndataset = "json"\ndataset_path = "books.jsonl"', "keeps its position by its name"),
    "table": ("[[stages]]\nname = \"long\"", "[stages]\nname = \"long\"", "array of tables|cannot|stages"),
}  # fmt: skip


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_stage_is_one_clear_error(in_tmp: Path, name: str) -> None:
    old, new, says = MISTAKES[name]
    assert old in RECIPE
    write_recipe(in_tmp, RECIPE.replace(old, new, 1))
    with pytest.raises(UserError, match=says):
        make_job("staged.toml")


def test_stages_without_checkpoints_are_refused(in_tmp: Path) -> None:
    write_recipe(in_tmp)
    with pytest.raises(UserError, match=r"set checkpoint\.enable = true"):
        run_staged(str(in_tmp), {"checkpoint.enable": "false"})


@pytest.mark.full
def test_a_first_stage_alone_needs_no_checkpoints(gloo: GlooPool, tmp_path: Path, whole: tuple[Path, RunRecord]) -> None:
    write_recipe(tmp_path)
    settings: dict[str, Any] = {"checkpoint.enable": "false", "training.stop_at_step": 4}
    assert gloo.run(1, run_staged, str(tmp_path), settings)[0].losses == whole[1].losses[:4]


class Terminates:
    """Receives SIGTERM in a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    @hookimpl
    def titan_before_update(self, update: Any) -> None:
        if update.step == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.full
def test_a_request_in_the_last_step_of_a_stage_stops_the_run(
    gloo: GlooPool, tmp_path: Path, whole: tuple[Path, RunRecord]
) -> None:
    """No step follows in which ranks would exchange it, and the next stage does not know it."""
    write_recipe(tmp_path)
    stopped = gloo.run(2, run_staged, str(tmp_path), {}, (Terminates(4),))[0]
    assert stopped.reason.startswith("SIGTERM") and len(stopped.losses) == 4
    require_equal([stopped, gloo.run(2, run_staged, str(tmp_path), {})[0]], whole[1])


@pytest.mark.full
@pytest.mark.parametrize(
    ("stop", "old", "new", "key"),
    [(4, "lr = 2e-3", "lr = 1e-3", "optimizer.lr"), (6, "seq_len = 64", "seq_len = 80", "training.seq_len")],
    ids=["where a stage begins", "within it"],
)
def test_a_change_that_no_stage_plans_is_refused(
    gloo: GlooPool, tmp_path: Path, stop: int, old: str, new: str, key: str
) -> None:
    write_recipe(tmp_path)
    gloo.run(1, run_staged, str(tmp_path), {"training.stop_at_step": stop})
    (tmp_path / "staged.toml").write_text(RECIPE.replace(old, new))
    with pytest.raises(RuntimeError, match=f"{key} .*restore the saved value"):
        gloo.run(1, run_staged, str(tmp_path), {})
