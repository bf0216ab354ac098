"""Each rank reads its part of weights that another format stores in packed tensors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from harness.gloo_pool import GlooPool
from harness.jobs import run_recipe
from harness.packed import write_packed
from titan_ckpt.foreign import files as foreign_files
from titan_core.cli.main import main

START = {
    "model.name": "packed", "model.flavor": "tiny", "training.steps": 1, "training.seq_len": 32,
    "training.local_batch_size": 2, "training.global_batch_size": 4, "job.device": "cpu", "checkpoint.enable": "true",
}  # fmt: skip


def trained(folder: str, overrides: dict[str, object]) -> tuple[float, int]:
    """Return the first loss, and the number of elements that this rank read."""
    os.chdir(folder)
    sizes = []
    original = foreign_files.SafetensorsFiles.read

    def counted(self: Any, name: str, box: Any, split: Any = None) -> Tensor:
        part = original(self, name, box, split)
        sizes.append(part.numel())
        return part

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foreign_files.SafetensorsFiles, "read", counted)
        record = run_recipe("tiny", {**START, **overrides})
    return record.losses[0], sum(sizes)


@pytest.mark.parametrize("mesh", [{}, {"parallelism.tensor_parallel_degree": 2}], ids=["fsdp", "tp"])
def test_each_rank_reads_its_part_of_packed_weights(gloo: GlooPool, tmp_path: Path, mesh: dict[str, object]) -> None:
    whole = sum(tensor.numel() for tensor in write_packed(tmp_path / "theirs").values())
    assert main(["checkpoint", "convert", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    start = "checkpoint.initial_load_path"
    ((loss, elements),) = gloo.run(1, trained, str(tmp_path), {start: "theirs", "job.dump_folder": "one"})
    ((own, _),) = gloo.run(1, trained, str(tmp_path), {start: "ours", "job.dump_folder": "own"})
    assert loss == own
    assert elements == whole
    for other, of_rank in gloo.run(2, trained, str(tmp_path), {start: "theirs", "job.dump_folder": "two", **mesh}):
        assert other == pytest.approx(loss, rel=1e-6)
        assert of_rank < (0.6 if not mesh else 0.95) * whole
