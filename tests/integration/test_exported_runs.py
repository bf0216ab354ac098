"""A run that exports each checkpoint (``checkpoint.export``): the folders are those of its steps, and whole after any kill.

The full run kills once. The long test kills twenty times, with two ranks:
``uv run pytest -m long tests/integration/test_exported_runs.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from titan_core.api import hookimpl
from titan_testing import PATIENCE
from titan_testing.jobs import run_recipe

ARGS = (
    "{dim = 64, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 96, vocab_size = 288, max_seq_len = 256, "
    "tie_embeddings = false}"
)
SETTINGS: dict[str, object] = {
    "model.args": ARGS,
    "training.seq_len": 64,
    "training.local_batch_size": 2,
    "training.global_batch_size": 4,
    "checkpoint.enable": "true",
    "checkpoint.interval": 2,
    "checkpoint.export": "hf",
    "job.device": "cpu",
    "job.dump_folder": "run",
}
TOKENS = torch.randint(0, 288, (2, 64), generator=torch.Generator().manual_seed(1))
FILES = {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
         "tokenizer_config.json"}  # fmt: skip


class Logits:
    """Records the model's logits after each step, and waits at ``at`` for the exports of the steps before."""

    def __init__(self, folder: Path, at: tuple[int, ...]) -> None:
        self.of: dict[int, Tensor] = {}
        self._folder, self._at = folder, at

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        self._module = run.parts[0].module

    @hookimpl
    def titan_step_end(self, report: Any) -> None:
        with torch.no_grad():
            self.of[report.step] = self._module(TOKENS).clone()
        if report.step in self._at:  # until a process has ended that is exporting: the run notices after this step
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            assert (self._folder / f"step-{report.step - 1}").exists()


def exported(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def require_logits(folder: Path, expected: Tensor) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert {path.name for path in folder.iterdir()} == FILES
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("exported").input_ids, skip_special_tokens=True) == "exported"


@pytest.mark.full
def test_each_export_has_the_logits_of_its_step_and_the_last_are_kept(in_tmp: Path) -> None:
    """Also in a run that resumes, and after exports that were interrupted."""
    folder = in_tmp / "run/hf"
    watch = Logits(folder, (3, 5))
    run_recipe("llama3_debug", {**SETTINGS, "training.steps": 6}, observers=[watch])
    assert exported(folder) == ["step-4", "step-6"]
    for step in (4, 6):
        require_logits(folder / f"step-{step}", watch.of[step])
    assert json.loads((folder / "step-6/config.json").read_text())["torch_dtype"] == "float32"
    (folder / "step-6").rename(folder / "step-6.partial")  # as a kill leaves it
    again = Logits(folder, (7,))
    run_recipe("llama3_debug", {**SETTINGS, "training.steps": 8}, observers=[again])
    assert exported(folder) == ["step-6", "step-8"]
    require_logits(folder / "step-6", watch.of[6])
    require_logits(folder / "step-8", again.of[8])


PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def start(ranks: int, steps: int, **changed: object) -> subprocess.Popen[str]:
    flags = [f"--{key}={value}" for key, value in {**SETTINGS, "training.steps": steps, **changed}.items()]
    command = [sys.executable, "-m", "titan_core", "train", "llama3_debug", *flags]
    command += ["--nproc-per-node", str(ranks)] if ranks > 1 else []
    environment = {key: value for key, value in os.environ.items() if key not in PLACE} | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=environment
    )


def require_whole(folder: Path) -> int:
    """Require each folder with the name of a step to be complete. Return their number."""
    from safetensors.torch import load_file

    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    for path in found:
        assert {file.name for file in path.iterdir()} == FILES
        assert json.loads((path / "config.json").read_text())["num_hidden_layers"] == 2
        tensors = load_file(path / "model.safetensors")
        assert len(tensors) == 21 and all(tensor.isfinite().all() for tensor in tensors.values())
    return len(found)


def being_written(folder: Path) -> set[tuple[str, int]]:
    """Return the exports that are not complete, with the time of the last change of each."""
    return {(path.name, int(path.stat().st_mtime_ns)) for path in folder.glob("step-*.partial")}


def exporters(folder: Path) -> list[str]:
    """Return the processes that export to the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if str(folder.resolve()).encode() in path.read_bytes():
                found.append(path.parent.name)
    return found


@pytest.mark.parametrize(
    ("ranks", "kills"), [pytest.param(1, 1, marks=pytest.mark.full), pytest.param(2, 20, marks=pytest.mark.long)]
)
def test_kills_leave_whole_folders_only(in_tmp: Path, ranks: int, kills: int) -> None:
    """Each run is killed at a random time from when an export is being written."""
    folder, random_ = Path("run/hf"), random.Random(ranks)
    folder.mkdir(parents=True)
    partial = 0
    for _ in range(kills):
        before = being_written(folder)  # what the last kill left
        run = start(ranks, 100_000)
        end = time.monotonic() + PATIENCE
        while not (written := being_written(folder) - before):
            assert run.poll() is None and time.monotonic() < end, run.communicate()
            require_whole(folder) if random_.random() < 0.02 else time.sleep(0.002)
        time.sleep(random_.choice((0.0, random_.uniform(0.0, 0.03), random_.uniform(0.0, 0.3))))
        # The launcher's threads start the ranks, each in a session of its own, which ends once its launcher has.
        children = [child for path in Path(f"/proc/{run.pid}/task").glob("*/children") for child in path.read_text().split()]
        os.kill(int(children[0]) if ranks > 1 and random_.random() < 0.5 else run.pid, signal.SIGKILL)
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate()  # ends once no process holds its output; the export has its own, and ends with its rank
        while exporters(folder):
            assert time.monotonic() < end
            time.sleep(0.002)
        partial += any((folder / name).exists() for name, _ in written)
        require_whole(folder)
    assert kills == 1 or partial >= kills // 4, "the kills came too late to interrupt an export"
    newest = max(int(path.name.removeprefix("step-")) for path in Path("run/checkpoint").glob("step-*"))
    run = start(ranks, newest + 2)
    output, _ = run.communicate(timeout=PATIENCE)
    assert run.returncode == 0, output
    assert not [name for name in exported(folder) if not name.removeprefix("step-").isdigit()]
    assert require_whole(folder) == 2


@pytest.mark.full
def test_rank_0_exports_the_whole_model(in_tmp: Path) -> None:
    run = start(
        2,
        4,
        **{"checkpoint.async_mode": "async", "checkpoint.export_folder": "exports", "checkpoint.export_dtype": "bfloat16"},
    )
    output, _ = run.communicate(timeout=PATIENCE)
    assert run.returncode == 0, output
    assert output.count("exported ") == len(exported(Path("run/exports"))) >= 1
    command = [sys.executable, "-m", "titan_core", "checkpoint", "convert", "run/checkpoint/step-4", "converted"]
    subprocess.run([*command, "--dtype", "bfloat16"], check=True)
    for name in FILES:
        assert Path("run/exports/step-4", name).read_bytes() == Path("converted", name).read_bytes(), name
