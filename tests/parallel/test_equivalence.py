"""Every parallelism, with every mode of activation checkpointing, trains as one device does.

``uv run pytest -m long tests/parallel/test_equivalence.py`` runs the whole table of :data:`titan_testing.meshes.CASES` on
the full ``tiny`` model. The full run covers part of it, with a smaller model and fewer steps. The quick loop runs one mesh
of each kind.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from titan_core.api import UserError
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, make_job, run_recipe
from titan_testing.meshes import (
    CASES,
    CP,
    FAST,
    HEADS,
    PP,
    RECOMPUTATION,
    SCHEDULE,
    SETTINGS,
    TINY,
    TP,
    Case,
    require_equal,
    run_in,
)
from titan_testing.pytest_plugin import RunJob
from titan_testing.suites import Suite

QUICK = {
    ("FSDP 2", "none"),
    ("HSDP 2x2", "none"),
    ("TP 2", "selective"),
    ("PP 2, 1F1B", "none"),
    ("PP 2, ZBVZeroBubble", "none"),
    ("CP 2", "full"),
    ("CP 2 by heads", "selective"),
}


def table() -> list[Any]:
    """Return (case, recomputation, settings) for each test, with marks for full and long runs."""
    rows = []
    for case in CASES:
        for mode in RECOMPUTATION:
            if mode in case.fast:
                marks = [] if (case.name, mode) in QUICK else [pytest.mark.full]
                rows.append(pytest.param(case, mode, "fast", id=f"{case.name}-{mode}", marks=marks))
            size = "tiny" if case.tiny else "whole"
            rows.append(pytest.param(case, mode, size, id=f"whole-{case.name}-{mode}", marks=pytest.mark.long))
    return rows


Reference = Callable[[str], RunRecord]


@pytest.fixture(scope="module")
def one_device(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The record of one device, by the name of its settings."""
    return functools.cache(lambda size: gloo.run(1, run_in, str(tmp_path_factory.mktemp(size)), SETTINGS[size])[0])


@pytest.mark.parametrize(("case", "recomputation", "size"), table())
def test_training_is_that_of_one_device(
    gloo: GlooPool, one_device: Reference, tmp_path: Path, case: Case, recomputation: str, size: str
) -> None:
    overrides = {**SETTINGS[size], **case.overrides, "activation_checkpoint.mode": recomputation}
    require_equal(gloo.run(case.ranks, run_in, str(tmp_path), overrides), one_device(size))


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        pytest.param(2, {"parallelism.fsdp_reshard_after_forward": "always"}, marks=pytest.mark.full),
        pytest.param(2, {"parallelism.fsdp_reshard_after_forward": "never"}, marks=pytest.mark.full),
        (2, {"parallelism.fsdp_group_mib": 25, "activation_checkpoint.mode": "full"}),
        pytest.param(2, {"parallelism.fsdp_group_mib": 25}, marks=pytest.mark.full),
        pytest.param(
            2,
            {"parallelism.fsdp_group_mib": 0.1, "parallelism.fsdp_reshard_after_forward": "always"},
            marks=pytest.mark.full,
        ),
        pytest.param(2, {"training.local_batch_size": 4}, marks=pytest.mark.full),
        (1, {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "2"}),
        pytest.param(1, {"training.enable_cpu_offload": "true"}, marks=pytest.mark.full),
        pytest.param(4, {"training.enable_cpu_offload": "true", TP: 2}, marks=pytest.mark.full),
        pytest.param(
            2,
            {"compile.enable": "true", "compile.backend": "aot_eager", "activation_checkpoint.mode": "selective"},
            marks=pytest.mark.full,
        ),
        pytest.param(2, {"compile.enable": "true", "compile.backend": "aot_eager", TP: 2}, marks=pytest.mark.full),
        pytest.param(2, {"compile.enable": "true", "compile.backend": "aot_eager", CP: 2}, marks=pytest.mark.full),
        pytest.param(4, {"compile.enable": "true", "compile.backend": "aot_eager", CP: 4, HEADS: 2}, marks=pytest.mark.full),
        pytest.param(2, {"compile.enable": "true", CP: 2, HEADS: 2}, marks=pytest.mark.full),
        pytest.param(
            2,
            {"compile.enable": "true", "compile.backend": "aot_eager", PP: 2, SCHEDULE: "Interleaved1F1B"},
            marks=pytest.mark.full,
        ),
        pytest.param(2, {"compile.enable": "true", "activation_checkpoint.mode": "memory_budget"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_settings_that_must_not_change_the_losses(
    gloo: GlooPool, one_device: Reference, tmp_path: Path, ranks: int, overrides: dict[str, object]
) -> None:
    require_equal(gloo.run(ranks, run_in, str(tmp_path), {**FAST, **overrides}), one_device("fast"))


@pytest.mark.quick_rows(2)
class TestTied(Suite):
    """A shared embedding, of a vocabulary that does not divide. ``test_switches.py`` has further meshes."""

    settings: ClassVar = {
        **FAST,
        "model.args.tie_embeddings": "true",
        "model.args.vocab_size": 259,
        "training.max_norm": 0.5,
    }
    meshes = (
        "PP 2, GPipe", "FSDP 2", "TP 2", "FSDP x TP", "PP 2, Interleaved1F1B", "FSDP x PP", "TP x PP", "PP x CP by heads",
        "PP 2, DualPipeV", "PP 2, ZBVZeroBubble",
    )  # fmt: skip

    def test_mesh(self, row: Case, run_job: RunJob) -> None:
        self.require_equal_on(row, run_job)


def test_mixed_precision_is_the_same_on_one_device_and_on_two(gloo: GlooPool, one_device: Reference, tmp_path: Path) -> None:
    mixed = {"training.mixed_precision_param": "bfloat16"}
    (one,) = gloo.run(1, run_in, str(tmp_path), {**FAST, **mixed})
    (two, _) = gloo.run(2, run_in, str(tmp_path), {**FAST, **mixed})
    assert all(tensor.dtype == torch.float32 for tensor in two.final.values())
    assert two.losses == pytest.approx(one.losses, rel=2e-3)
    assert one.losses == pytest.approx(one_device("fast").losses, rel=2e-2)
    assert one.losses != one_device("fast").losses


def rope_dtype(folder: str) -> torch.dtype:
    """Return the dtype of the rotary table that blocks receive under mixed precision."""
    from titan_core.api import hookimpl
    from titan_core.loop.training import train

    os.chdir(folder)
    seen: list[torch.dtype] = []

    class Spy:
        @hookimpl
        def titan_train_start(self, run: Any) -> None:
            for block in run.parts[0].blocks().values():
                block.attention.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[1].dtype))

    train(make_job("tiny", {**TINY, "training.mixed_precision_param": "bfloat16", "training.steps": 1}), [Spy()])
    assert len(set(seen)) == 1
    return seen[0]


def test_mixed_precision_leaves_rotary_tables_exact(gloo: GlooPool, tmp_path: Path) -> None:
    assert gloo.run(1, rope_dtype, str(tmp_path)) == [torch.float32]


def bad_record(folder: str) -> str:
    """Train on data of which only rank 1's share has unreadable records; return the error."""
    os.chdir(folder)
    documents = "/".join(["60"] * 200 + ["!"] * 4)
    overrides = {**TINY, "training.dataset": "letters", "training.dataset_path": documents, "training.steps": 500}
    try:
        run_recipe("tiny", overrides)
    except UserError as error:
        return str(error)
    return "no error"


def test_a_bad_record_on_one_rank_is_the_same_clear_error_on_all(gloo: GlooPool, tmp_path: Path) -> None:
    messages = gloo.run(2, bad_record, str(tmp_path))
    assert messages[0] == messages[1]
    assert "no letters" in messages[0]


def different_seeds(folder: str) -> str:
    os.chdir(folder)
    try:
        run_recipe("tiny", {**TINY, "training.seed": 100 + (os.environ["RANK"] == "1")})
    except UserError as error:
        return str(error)
    return "no error"


def test_a_rank_with_another_config_is_named(gloo: GlooPool, tmp_path: Path) -> None:
    for message in gloo.run(4, different_seeds, str(tmp_path)):
        assert message.startswith(
            "rank 1: its job differs from that of rank 0 in config.training.seed (100 on rank 0, 101 here)"
        )


def uneven_data(folder: str) -> tuple[str, int]:
    """Train on streams of very different lengths, of which rank 1's ends first; return why and when the run stopped."""
    os.chdir(folder)
    documents = "/".join("30" if index % 4 else "2400" for index in range(64))
    record = run_recipe(
        "tiny",
        {
            **TINY,
            "training.dataset": "letters",
            "training.dataset_path": documents,
            "data.on_end": "stop",
            "training.steps": 500,
        },
    )
    return record.reason, len(record.losses)


def test_data_that_ends_unevenly_stops_all_ranks_at_the_same_step(gloo: GlooPool, tmp_path: Path) -> None:
    (one,) = gloo.run(1, uneven_data, str(tmp_path))
    folder = tmp_path / "two"
    folder.mkdir()
    assert gloo.run(2, uneven_data, str(folder)) == [one, one]
    assert one[0] == "the dataset has ended"
    assert one[1] >= 1
