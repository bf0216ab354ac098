"""Keys that select what to load. Keys and patterns without effect are refused."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from titan_ckpt.format.catalogue import entry
from titan_ckpt.format.dtypes import to_dtype
from titan_ckpt.format.folder import Folder
from titan_ckpt.format.layout import Layout
from titan_ckpt.format.manifest_checks import _require_known_names
from titan_ckpt.format.stored import BrokenCheckpoint, StoredTensor
from titan_core.api import UserError, hookimpl
from titan_testing.jobs import make_job, run_recipe

ARGS = "{dim = 32, n_layers = 1, n_heads = 2, n_kv_heads = 1, ffn_dim = 48%s}"
TINY: dict[str, object] = {
    "model.args": ARGS % "", "training.seq_len": 16, "training.local_batch_size": 2, "training.global_batch_size": 2,
    "training.steps": 2, "checkpoint.enable": "true", "checkpoint.interval": 1, "job.device": "cpu",
    "job.dump_folder": "run",
}  # fmt: skip
WEIGHTS = {"checkpoint.initial_load_path": "run/checkpoint/step-2", "job.dump_folder": "other", "training.steps": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run with checkpoints of steps 1 and 2. Returns its parent folder."""
    folder, before = tmp_path_factory.mktemp("loading"), os.getcwd()
    os.chdir(folder)
    try:
        run_recipe("tiny", TINY)
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def saved(run: Path, in_tmp: Path) -> None:
    shutil.copytree(run, in_tmp, dirs_exist_ok=True)


@pytest.mark.parametrize(
    "start", [{"checkpoint.load_step": 1}, WEIGHTS, {**WEIGHTS, "checkpoint.initial_load_model_only": "false"}], ids=str
)
def test_a_pattern_that_matches_nothing_is_refused(saved: None, start: dict[str, object]) -> None:
    excluded = {**TINY, **start, "checkpoint.exclude_from_loading": '["model.outptu.*", "model.output.*"]'}
    message = (
        r'exclude_from_loading = "model.outptu.\*": matches nothing in run/checkpoint/step-.*use names such as .model\.'
    )
    with pytest.raises(UserError, match=message) as caught:
        run_recipe("tiny", excluded)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [("load_step", "1"), ("initial_load_path", "run/checkpoint/step-1"), ("exclude_from_loading", '["model.output.*"]')],
)
def test_a_key_without_effect_is_refused(in_tmp: Path, key: str, value: str) -> None:
    off = {**TINY, "checkpoint.enable": "false", f"checkpoint.{key}": value}
    with pytest.raises(UserError, match=f"{key} would have no effect without checkpoint.enable = true"):
        make_job("tiny", off)


def test_exclude_from_loading_requires_something_to_load(in_tmp: Path) -> None:
    with pytest.raises(UserError, match="applies to load_step and initial_load_path, and neither is set"):
        make_job("tiny", {**TINY, "checkpoint.exclude_from_loading": '["optimizer.*"]'})


def test_weights_of_a_model_with_other_arguments_are_refused(saved: None, caplog: pytest.LogCaptureFixture) -> None:
    other = {**TINY, **WEIGHTS, "model.args": ARGS % ", norm_eps = 0.001"}
    with pytest.raises(UserError, match=r"model.args.norm_eps = .*are of a model with 1e-05.*allow_changed"):
        run_recipe("tiny", other)
    longer = {**TINY, **WEIGHTS, "model.args": ARGS % ", max_seq_len = 4096"}
    assert run_recipe("tiny", longer).losses
    with caplog.at_level(logging.WARNING, logger="titan_ckpt"):
        run_recipe("tiny", {**other, "job.dump_folder": "3", "checkpoint.allow_changed": '["model.args.norm_eps"]'})
    assert "the model differs from that of the weights: model.args.norm_eps: 1e-05 -> 0.001" in caplog.text


def test_a_conversion_that_overflows_is_refused() -> None:
    tensor = torch.tensor([1.0, 7e4])
    with pytest.raises(
        UserError, match=r"w: its largest value is 7e\+04, but float16 is limited to 6.55e\+04; use --dtype bfloat16"
    ):
        to_dtype(tensor, torch.float16, "w")
    assert torch.equal(to_dtype(tensor, torch.bfloat16, "w"), tensor.bfloat16())
    assert to_dtype(torch.tensor([torch.inf]), torch.float16, "w").isinf().all()  # was infinite before


class Grows:
    """Makes a weight too large for float16."""

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        self.weight = next(iter(run.parts[0].module.parameters())).data  # whose changes are not counted

    @hookimpl
    def titan_step_end(self) -> None:
        self.weight.view(-1)[0] = 1e5


def test_an_export_that_would_overflow_keeps_the_dtype(in_tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
    export = {"checkpoint.last_save_model_only": "true", "checkpoint.export_dtype": "float16", "checkpoint.interval": 10}
    run_recipe("tiny", {**TINY, **export}, observers=[Grows()])
    manifest = entry(Folder("run/checkpoint/step-2"), 2).manifest
    assert manifest is not None and {tensor.dtype for tensor in manifest.tensors.values()} == {"float32"}
    assert (
        "has values too large for checkpoint.export_dtype = 'float16': the weights are saved in their own dtype"
        in caplog.text
    )


def test_unknown_and_missing_tensors_are_refused() -> None:
    tensor = StoredTensor("float32", Layout(((0, 1),), (0,)))
    whole = {"model.w": tensor, "optimizer.w.exp_avg": tensor, "observers.mine": tensor}
    replica = {f"replica-1.{name}": tensor for name in whole}
    _require_known_names(whole, 1)
    _require_known_names(whole | replica, 2)
    _require_known_names({}, 2**31 - 1)  # returns without a loop over replicas
    mixed = {**replica, "replica-1.model.w": replace(tensor, dtype="bfloat16")}
    damages = [(whole | {"more.w": tensor}, 1), (whole | replica, 1), (whole, 2**31 - 1), (whole | mixed, 2)]
    for tensors, replicas in damages:
        with pytest.raises(BrokenCheckpoint):
            _require_known_names(tensors, replicas)


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize("path", ["run", "run/", "run/checkpoint"])
@pytest.mark.parametrize("newest", [2, 1])
def test_a_run_starts_from_the_newest_complete_checkpoint_of_another(
    saved: None, caplog: pytest.LogCaptureFixture, path: str, newest: int
) -> None:
    if newest == 1:
        Path("run/checkpoint/step-2/checkpoint.json").unlink()
    run_recipe("tiny", {**TINY, **WEIGHTS, "checkpoint.initial_load_path": path})
    assert f"starting from the weights in run/checkpoint/step-{newest}" in caplog.text


@pytest.mark.parametrize("path", ["nowhere", "."])
def test_a_path_without_weights_is_refused(saved: None, path: str) -> None:
    why = "there are no checkpoints here; set it to a checkpoint, a run's directory, or a folder of weights"
    with pytest.raises(UserError, match=why):
        run_recipe("tiny", {**TINY, **WEIGHTS, "checkpoint.initial_load_path": path})
