"""``titan checkpoint`` lists and verifies checkpoints, and removes only the requested ones."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from titan_core.cli.main import main
from titan_testing.jobs import run_recipe

TINY: dict[str, object] = {
    "model.args": "{dim = 32, n_layers = 1, n_heads = 2, n_kv_heads = 1, ffn_dim = 48}",
    "training.seq_len": 16,
    "training.local_batch_size": 2,
    "training.steps": 4,
    "checkpoint.enable": "true",
    "checkpoint.interval": 2,
    "job.device": "cpu",
    "job.dump_folder": "run",
}


@pytest.fixture
def run(in_tmp: Path) -> Path:
    """A run with checkpoints of steps 2 and 4, and an interrupted save of step 6."""
    run_recipe("tiny", TINY)
    (in_tmp / "run/checkpoint/step-6").mkdir()
    (in_tmp / "run/checkpoint/step-6/data-00000.bin").write_bytes(b"half")
    return in_tmp / "run"


def test_list(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in ("run", "run/checkpoint", "run/checkpoint/step-2", "run/"):
        assert main(["checkpoint", "list", path, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [(checkpoint["step"], checkpoint["complete"]) for checkpoint in found] == [(6, False), (4, True), (2, True)]
    assert main(["checkpoint", "list", "run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "not complete: there is no checkpoint.json" in lines[1]
    assert lines[2].startswith("4     one device") and lines[2].endswith("complete")


def test_show_selects_the_newest_complete_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", "run", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["step"], shown["model"], shown["tensors"]) == (4, "tiny debug", 12 * 4)
    assert shown["about"]["config"]["training"]["steps"] == 4
    assert main(["checkpoint", "show", "run", "--step", "2", "--tensors"]) == 0
    assert "model.tok_embeddings.weight" in capsys.readouterr().out
    assert main(["checkpoint", "show", "run", "--step", "6"]) == 2


def test_verify(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", "run", "--step", "4"]) == 0
    assert capsys.readouterr().out == "step 4: intact\n"
    data = run / "checkpoint/step-2/data-00000.bin"
    data.write_bytes(b"\xff" + data.read_bytes()[1:])
    assert main(["checkpoint", "verify", "run"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "step 4: intact"
    assert lines[2].startswith("step 2: data-00000.bin is damaged in ")
    assert main(["checkpoint", "verify", "run", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(checkpoint["step"], checkpoint["intact"]) for checkpoint in found] == [(6, False), (4, True), (2, False)]


def test_rm(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "rm", "run", "--step", "2", "4"]) == 2
    assert "no complete checkpoint would be left; add --force to remove them anyway" in capsys.readouterr().err
    assert main(["checkpoint", "rm", "run", "--step", "3"]) == 2
    assert "there is no step 3; choose from 6, 4, 2" in capsys.readouterr().err
    assert main(["checkpoint", "rm", "run", "--step", "2", "6"]) == 0
    assert [path.name for path in (run / "checkpoint").iterdir()] == ["step-4"]


def test_a_folder_without_checkpoints(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "list", "nowhere"]) == 2
    assert "nowhere: there are no checkpoints here" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["list", "show", "verify"])
def test_torch_is_not_imported(run: Path, command: str) -> None:
    program = (
        "import sys\nfrom titan_core.cli.main import main\n"
        f"main(['checkpoint', {command!r}, 'run'])\nprint('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("False\n")


def test_a_checkpoint_in_a_folder_of_any_name(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run / "checkpoint/step-4", run.parent / "kept")
    assert main(["checkpoint", "verify", "kept"]) == 0
    assert capsys.readouterr().out == "step 4: intact\n"
    assert main(["checkpoint", "list", "kept"]) == 0
    assert "complete" in capsys.readouterr().out
    (run.parent / "kept/checkpoint.json").write_text("{}")
    assert main(["checkpoint", "verify", "kept"]) == 1
    assert capsys.readouterr().out.startswith("kept: checkpoint.json is damaged")
