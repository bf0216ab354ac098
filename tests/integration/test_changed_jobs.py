"""A resumed job trains the same as the saved run, or is refused. Permitted changes are logged."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.ring import ring_job
from titan_ckpt.format.folder import Folder
from titan_ckpt.resume.comparing import require_same_training
from titan_ckpt.resume.config_changes import config_changes, decisive_keys
from titan_ckpt.resume.loading import _another_optimizer
from titan_core.api import Problem, RefusedChange, UserError, matches
from titan_core.api.checkpoint.store import refused_changes
from titan_core.api.config.secrets import redact
from titan_core.plugins.registry import Components
from titan_testing.jobs import make_job, run_recipe

MODEL = "{dim = 32, n_layers = 1, n_heads = 2, n_kv_heads = 1, ffn_dim = 48%s}"
TINY: dict[str, object] = {
    "model.args": MODEL % "",
    "training.dataset": "json",
    "training.dataset_path": "data.jsonl",
    "training.seq_len": 16,
    "training.local_batch_size": 2,
    "training.global_batch_size": 2,
    "optimizer.lr": 0.0008,
    "lr_scheduler.warmup_steps": 20,
    "training.steps": 3,
    "checkpoint.enable": "true",
    "job.device": "cpu",
    "job.dump_folder": "run",
}
LINES = [json.dumps({"text": f"document {number} " * 9}) for number in range(40)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that stopped after two of three steps, and its data."""
    folder = tmp_path_factory.mktemp("changed")
    with contextlib.chdir(folder):
        Path("data.jsonl").write_text("\n".join(LINES) + "\n")
        run_recipe("llama3_debug", {**TINY, "training.stop_at_step": 2})
    return folder


@pytest.fixture
def about(run: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What its checkpoint says about the run, in whose folder the test is."""
    monkeypatch.chdir(run)
    found: dict[str, Any] = json.loads(Path("run/checkpoint/step-2/checkpoint.json").read_text())["checkpoint"]["about"]
    return found


@pytest.fixture
def saved(run: Path, in_tmp: Path) -> None:
    shutil.copytree(run, in_tmp, dirs_exist_ok=True)


REFUSED = {
    "model.args.rope_theta": {"model.args": MODEL % ", rope_theta = 20000.0"},
    "model.args.norm_eps": {"model.args": MODEL % ", norm_eps = 0.001"},
    "model.args.max_seq_len": {"model.args": MODEL % ", max_seq_len = 64"},
    "model.args.rope_scaling.factor": {"model.args": MODEL % ", rope_scaling = {factor = 4.0}"},
    "optimizer.name": {"optimizer.name": "Adam"},
    "optimizer.lr": {"optimizer.lr": 0.1},
    "optimizer.beta1": {"optimizer.beta1": 0.5},
    "optimizer.beta2": {"optimizer.beta2": 0.5},
    "optimizer.eps": {"optimizer.eps": 0.1},
    "optimizer.weight_decay": {"optimizer.weight_decay": 0.3},
    "optimizer.param_groups": {"optimizer.param_groups": '[{pattern = "*norm*", lr_scale = 0.5}]'},
    "lr_scheduler.warmup_steps": {"lr_scheduler.warmup_steps": 1},
    "lr_scheduler.decay_ratio": {"lr_scheduler.decay_ratio": 0.3},
    "lr_scheduler.decay_type": {"lr_scheduler.decay_type": "cosine"},
    "training.max_norm": {"training.max_norm": 0.1},
    "training.seq_len": {"training.seq_len": 8},
    "training.mixed_precision_param": {"training.mixed_precision_param": "bfloat16"},
    "training.float32_matmul_precision": {"training.float32_matmul_precision": "high"},
    "training.global_batch_size": {"training.global_batch_size": 4, "data.logical_shards": 2},
    "data.document_mask": {"data.document_mask": "true"},
    "float8.enable": {"float8.enable": "true", "float8.emulate": "true"},
}


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("key", REFUSED)
def test_a_change_to_what_is_trained_is_refused_by_its_key(about: dict[str, Any], key: str) -> None:
    job = make_job("llama3_debug", {**TINY, **REFUSED[key]}, world_size=1)
    with pytest.raises(UserError, match=rf'(?s){key} = .*allow_changed = \[.*"{key}".*\]') as caught:
        require_same_training(job, about, 2, [])
    if key not in ("float8.enable", "model.args.rope_scaling.factor"):  # the message also lists other keys of the section
        assert len(caught.value.problems) == 1
    allowed = require_same_training(job, about, 2, [key.rpartition(".")[0] + ".*"])
    assert key in [change.key for change in allowed.config]


def test_a_refused_job_names_the_change_and_how_to_continue(saved: None, caplog: pytest.LogCaptureFixture) -> None:
    changed = {**TINY, "optimizer.lr": 0.002, "optimizer.weight_decay": 0.2}
    with pytest.raises(UserError) as caught:
        run_recipe("llama3_debug", changed)
    assert [problem.where for problem in caught.value.problems] == [
        "command line: optimizer.lr = 0.002", "command line: optimizer.weight_decay = 0.2", "",
    ]  # fmt: skip
    with caplog.at_level(logging.INFO, logger="titan_ckpt"):
        record = run_recipe("llama3_debug", {**changed, "checkpoint.allow_changed": '["optimizer.*"]'})
    assert len(record.losses) == 1
    assert "optimizer.lr: 0.0008 -> 0.002" in caplog.text
    rates = [json.loads(line)["lr"] for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert rates[-1] == pytest.approx(rates[0] * 3 * 0.002 / 0.0008)  # the last of three warmup steps


def test_one_list_allows_everything_that_was_refused(saved: None) -> None:
    """The list contains config keys, data and the keys that are already allowed, so pasting it is enough."""
    changed = {**TINY, "optimizer.lr": 0.002, "training.seed": 7, "training.max_norm": 0.5}
    changed["checkpoint.allow_changed"] = '["training.max_norm"]'
    Path("data.jsonl").write_text("\n".join([*LINES[1:], LINES[0]]) + "\n")
    with pytest.raises(UserError) as caught:
        run_recipe("llama3_debug", changed)
    lists = re.findall(r"checkpoint.allow_changed = (\[.*\])", str(caught.value))
    assert lists == ['["training.max_norm", "optimizer.lr", "training.seed", "dataset.json.content"]']
    assert len(run_recipe("llama3_debug", {**changed, "checkpoint.allow_changed": lists[0]}).losses) == 1


def test_one_list_allows_all_values_of_parameter_groups() -> None:
    problems = [
        "optimizer.groups.nesterov of a is True in the checkpoint and False in this job",
        "optimizer.groups.foreach of a is ...",
    ]
    error = _another_optimizer(Folder("run"), problems, ["optimizer.lr"])
    assert str(error).count("allow_changed") == 1
    assert '["optimizer.lr", "optimizer.groups.nesterov", "optimizer.groups.foreach"]' in str(error)


def test_a_change_that_nothing_allows_offers_no_list() -> None:
    fixed = RefusedChange("data.logical_shards", Problem("data.logical_shards = 4", "was 2", "set it back"), allowable=False)
    other = RefusedChange("training.seed", Problem("training.seed = 4", "was 2", "set it back"))
    assert "allow_changed" not in str(refused_changes([fixed, other], []))


def test_permitted_changes_are_logged(saved: None, caplog: pytest.LogCaptureFixture) -> None:
    changes = {"training.steps": 4, "metrics.log_freq": 7, "data.prefetch": 3, "training.global_batch_size": -1}
    with caplog.at_level(logging.INFO, logger="titan_ckpt"):
        record = run_recipe("llama3_debug", {**TINY, **changes})
    assert len(record.losses) == 2
    for line in ("training.steps: 3 -> 4", "metrics.log_freq: 10 -> 7", "data.prefetch: 2 -> 3"):
        assert f"changed since the checkpoint of step 2: {line}" in caplog.text
    assert "the learning rate follows the schedule for 4 steps" in caplog.text
    assert "training.freeze" not in caplog.text


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize(("saved", "decisive"), [([], True), ("3", True), (-1, True), (7, False)], ids=str)
def test_an_invalid_saved_value_is_damage_not_a_change(in_tmp: Path, saved: Any, decisive: bool) -> None:
    config = make_job("llama3_debug").config
    before = config.as_dict()
    before["training"]["steps"] = saved
    assert [(one.key, one.decisive) for one in config_changes(before, [], config)] == [("training.steps", decisive)]


def test_the_same_model_from_another_recipe_is_accepted(about: dict[str, Any]) -> None:
    job = make_job("llama3_debug", TINY, world_size=1)
    about["config"]["model"] |= {"flavor": "mine", "args": {}}  # the arguments of flavor "mine"
    assert [change.key for change in require_same_training(job, about, 2, []).config][:2] == ["model.flavor", "model.args"]


def test_another_version_of_a_plugin_is_logged(about: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    about["plugins"]["titan-parallel:parallel"] = "0.0.9"
    with caplog.at_level(logging.INFO, logger="titan_ckpt"):
        require_same_training(make_job("llama3_debug", TINY, world_size=1), about, 2, [])
    assert "titan-parallel:parallel 0.0.9 -> " in caplog.text


def test_keys_of_a_missing_plugin_matter_if_they_decided_what_was_trained(about: dict[str, Any]) -> None:
    config = make_job("llama3_debug", TINY, world_size=1).config
    before = {**config.as_dict(), "gone": {"enable": True, "size": 3}}
    assert config_changes(before, [], config) == []
    assert [str(one) for one in config_changes(before, ["gone.enable"], config)] == ["gone.enable: true -> null"]


@pytest.mark.parametrize("diverges", [False, True])
def test_the_size_of_a_third_partys_dimension_may_change(diverges: bool) -> None:
    """Its section declares nothing; replicas that diverge are trained otherwise."""
    one, two = (ring_job("batch", diverges, ("ring",), overrides={"ring.degree": degree}) for degree in (1, 2))
    changes = config_changes(one.config.as_dict(), [], two.config, two.mesh.degree_keys)
    assert [(change.key, change.decisive) for change in changes] == [("ring.degree", diverges)]
    assert ("ring.degree" in decisive_keys(two.config, two.mesh.degree_keys)) == diverges


def test_secrets_are_compared_redacted(about: dict[str, Any]) -> None:
    config = make_job("llama3_debug", {**TINY, "job.description": "see https://me:secret@example.org"}, world_size=1).config
    assert config_changes(redact(config.as_dict()), decisive_keys(config), config) == []
    (change,) = config_changes({**config.as_dict(), "job": {**config.as_dict()["job"], "description": ""}}, [], config)
    assert "secret" not in str(change)


def test_every_may_change_declaration_names_existing_keys() -> None:
    for classes in Components.from_installed().sections().values():
        for cls in classes:
            for pattern in cls.may_change:
                assert any(matches(name, [pattern]) for name in cls.model_fields), (cls, pattern)


EDITS = {
    "reordered": [*LINES[1:], LINES[0]],
    "another word": [*LINES[:20], LINES[20].replace("document", "dokument"), *LINES[21:]],
    "a longer text": [*LINES[:20], LINES[20].replace("document", "documents"), *LINES[21:]],
}


@pytest.mark.parametrize("edit", EDITS)
def test_edited_data_is_refused(saved: None, edit: str) -> None:
    Path("data.jsonl").write_text("\n".join(EDITS[edit]) + "\n")
    with pytest.raises(
        UserError, match=r"dataset 'json': its content: differs from the data .*sample .*dataset.json.content"
    ):
        run_recipe("llama3_debug", TINY)
    if edit == "reordered":
        allowed = {**TINY, "checkpoint.allow_changed": '["dataset.json.content"]'}
        assert len(run_recipe("llama3_debug", allowed).losses) == 1


def test_a_copy_of_the_data_in_another_place_is_accepted(saved: None) -> None:
    shutil.copy("data.jsonl", "copy.jsonl")
    os.utime("copy.jsonl", (1, 1))
    Path("data.jsonl").unlink()
    assert len(run_recipe("llama3_debug", {**TINY, "training.dataset_path": "copy.jsonl"}).losses) == 1
