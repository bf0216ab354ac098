"""``titan checkpoint merge``: the mean of several checkpoints is a checkpoint with weights alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from titan_ckpt.format.catalogue import pick
from titan_ckpt.format.chunks import read_whole
from titan_core.cli.main import main
from titan_testing.jobs import run_recipe

TINY: dict[str, object] = {
    "model.args": "{dim = 32, n_layers = 1, n_heads = 2, n_kv_heads = 1, ffn_dim = 48}", "training.seq_len": 16,
    "training.local_batch_size": 2, "training.steps": 6, "checkpoint.enable": "true", "checkpoint.interval": 2,
    "checkpoint.keep_latest_k": 0, "job.device": "cpu", "job.dump_folder": "run",
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("merge")
    run_recipe("tiny", {**TINY, "job.dump_folder": str(folder / "run")})
    return folder / "run"


@pytest.fixture
def run(trained: Path, in_tmp: Path) -> Path:
    shutil.copytree(trained, in_tmp / "run")
    return Path("run")


def weights(path: str | Path, step: int | None = None) -> dict[str, Tensor]:
    found = pick(str(path), step)
    assert found.manifest is not None
    names = [name for name in found.manifest.tensors if name.startswith("model.")]
    return {name: read_whole(found.folder, found.manifest, name) for name in names}


def require_mean(path: str | Path, merged: list[dict[str, Tensor]]) -> None:
    found = weights(path)
    assert found.keys() == merged[0].keys()
    for name, tensor in found.items():
        mean = torch.stack([one[name].double() for one in merged]).mean(0).float()
        torch.testing.assert_close(tensor, mean, rtol=1e-7, atol=0, msg=name)


def test_the_last_checkpoints_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "merge", "run", "merged", "--last", "2"]) == 0
    assert capsys.readouterr().out == "wrote merged: weights of step 6, step 4\n"
    require_mean("merged", [weights(run, 4), weights(run, 6)])
    assert main(["checkpoint", "verify", "merged"]) == 0
    assert "intact" in capsys.readouterr().out
    assert main(["checkpoint", "show", "merged", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["model_only"] and shown["step"] == 6
    assert [Path(one).name for one in shown["about"]["merged"]["of"]] == ["step-6", "step-4"]


def test_chosen_steps_and_checkpoints(run: Path) -> None:
    assert main(["checkpoint", "merge", "run", "merged", "--steps", "2", "6"]) == 0
    require_mean("merged", [weights(run, 2), weights(run, 6)])
    assert main(["checkpoint", "merge", "run/checkpoint/step-2", "run/checkpoint/step-4", "run", "soup"]) == 0
    require_mean("soup", [weights(run, 2), weights(run, 4), weights(run, 6)])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "new"], "run/checkpoint/step-6: is a single checkpoint, with nothing to merge"),
        (["run", "new", "--last", "4"], "run: has 3 complete checkpoint(s), fewer than 4"),
        (["run", "new", "--steps", "2", "3"], "step-3"),
        (["run", "run", "new", "--last", "2"], "--last: chooses from one run; give one SOURCE"),
        (["run", "run/checkpoint/step-6", "new"], "run/checkpoint/step-6: is given twice"),
        (["run", "new", "--averages"], "step-6: contains no averaged weights"),
        (["run", "run/checkpoint", "--last", "2"], "run/checkpoint: already exists and is not empty"),
        (["run", "step-7", "--last", "2"], "step-7: only a run may name the folders of its checkpoints step-N"),
        (["run", "nowhere", "new"], "nowhere: there are no checkpoints here"),
    ],
)
def test_a_mistake_is_one_error(run: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name for path in Path().iterdir()}
    assert main(["checkpoint", "merge", *arguments]) == 2
    assert says in capsys.readouterr().err
    assert {path.name for path in Path().iterdir() if not path.name.endswith(".lock")} == before


def test_another_model_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_recipe("tiny", {**TINY, "training.steps": 2, "job.dump_folder": "other", "model.args": "{dim = 16, n_layers = 1}"})
    assert main(["checkpoint", "merge", "run", "other", "new"]) == 2
    assert "other/checkpoint/step-2: is of another shape of the model than" in capsys.readouterr().err


def test_a_damaged_checkpoint_leaves_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "checkpoint/step-4/data-00000.bin"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    for byte in range(0, len(data), 64):
        data[byte] ^= 1
    file.write_bytes(bytes(data))
    assert main(["checkpoint", "merge", "run", "merged", "--last", "2"]) == 2
    assert "step-4" in capsys.readouterr().err
    assert not Path("merged").exists() and not Path("merged.partial").exists()
