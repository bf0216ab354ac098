"""A model whose attention has windows, capped scores, sinks and narrow values trains on every mesh as on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.quick import rows
from harness.small_gpt import HEAD_DIM, small, train_model
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord
from titan_testing.meshes import CP, HEADS, PP, SCHEDULE, TP, require_equal

BRIEF: dict[str, object] = {
    "training.steps": 3,
    "optimizer.eps": 1e-5,  # otherwise Adam turns the rounding of the smallest gradients into steps of full size
    "training.seq_len": 32,
    "training.global_batch_size": 8,
    "lr_scheduler.warmup_steps": 1,
}
OPTIONS = ({"window": 6, "softcap": 2.0, "scale": 1.6}, {"sinks": True, "scale": 2.8})
"""Of the attention of each block."""
DOCUMENTS: dict[str, object] = {
    "training.dataset": "letters",
    "training.dataset_path": "/".join(str(9 + 7 * number % 23) for number in range(60)),
    "data.document_mask": "true",
}
AC = "activation_checkpoint.mode"
MESHES: dict[str, tuple[int, dict[str, object]]] = {
    "FSDP 2": (2, {}),
    "TP 2": (2, {TP: 2}),
    "TP 2, no SP": (2, {TP: 2, "parallelism.disable_sequence_parallel": "true"}),
    "PP 2": (2, {PP: 2}),
    "PP 2, 1F1B": (2, {PP: 2, SCHEDULE: "1F1B"}),
    "CP 2": (2, {CP: 2}),
    "CP 4, passed": (4, {CP: 4, "parallelism.context_parallel_rotate_method": "alltoall", AC: "selective"}),
    "CP 2 by heads": (2, {CP: 2, HEADS: 2, AC: "full"}),
    "CP 4 by heads": (4, {CP: 4, HEADS: 4, AC: "selective"}),
    "CP 2x2 by rings and heads": (4, {CP: 4, HEADS: 2}),
    "TP x CP": (4, {TP: 2, CP: 2}),
    "TP x CP by heads": (4, {TP: 2, CP: 2, HEADS: 2, AC: "selective"}),
    "CP 2, compiled": (2, {CP: 2, "compile.enable": "true", "compile.backend": "aot_eager"}),
    "CP 2 by heads, compiled": (2, {CP: 2, HEADS: 2, "compile.enable": "true", "compile.backend": "aot_eager"}),
}
CASES = {f"{mesh}{kind}": (mesh, kind) for mesh in MESHES for kind in ("", ", documents")}


def train(folder: str, overrides: dict[str, object], options: Any = OPTIONS) -> RunRecord:
    return train_model(folder, small(attention=options, value_dim=HEAD_DIM - 2), overrides)


QUICK = ("CP 2", "CP 2x2 by rings and heads, documents")
FULL = tuple(f"{mesh}, documents" for mesh in MESHES if mesh != "CP 2x2 by rings and heads")


@pytest.mark.parametrize("case", rows(CASES, QUICK, FULL))
def test_training_is_that_of_one_device(gloo: GlooPool, tmp_path: Path, case: str) -> None:
    mesh, kind = CASES[case]
    ranks, overrides = MESHES[mesh]
    settings = {**BRIEF, **(DOCUMENTS if kind else {})}
    (one,) = gloo.run(1, train, str(tmp_path), settings)
    require_equal(gloo.run(ranks, train, str(tmp_path), {**settings, **overrides}), one)


@pytest.mark.full
def test_each_option_changes_the_losses(gloo: GlooPool, tmp_path: Path) -> None:
    """Otherwise the comparison above could pass without it."""
    (whole,) = gloo.run(1, train, str(tmp_path), BRIEF)
    for block, name in ((0, "window"), (0, "softcap"), (0, "scale"), (1, "sinks"), (1, "scale")):
        fewer = [
            {key: value for key, value in one.items() if (index, key) != (block, name)} for index, one in enumerate(OPTIONS)
        ]
        (record,) = gloo.run(1, train, str(tmp_path), BRIEF, fewer)
        assert record.losses[1:] != pytest.approx(whole.losses[1:], rel=1e-6), name
