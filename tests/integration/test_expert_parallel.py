"""Expert parallelism trains as one device: with both dispatches, on every mesh, with more ranks than experts."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from harness.quick import rows
from harness.third_party import train_with
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, run_recipe

EP, TP, PP, CP = (f"parallelism.{name}_parallel_degree" for name in ("expert", "tensor", "pipeline", "context"))
REPLICATE, AC = "parallelism.data_parallel_replicate_degree", "activation_checkpoint.mode"
NO_SP = "parallelism.disable_sequence_parallel"
DEVICE: dict[str, object] = {"parallelism.expert_parallel_dispatch": "device"}
MOE: dict[str, object] = {
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.global_batch_size": 8,
    "training.steps": 4,
    "lr_scheduler.warmup_steps": 2,
}
TWO, FOUR = ({"model.args": f"{{dim = 32, expert_dim = 24, n_experts = {number}}}"} for number in (2, 4))
MESHES: dict[str, tuple[int, dict[str, object]]] = {
    "EP 2": (2, {EP: 2, **DEVICE}),
    "EP 2, a capacity that suffices": (2, {EP: 2, **DEVICE, "parallelism.expert_parallel_capacity": 1.9}),
    "EP 2 x FSDP 2": (4, {EP: 2, **DEVICE}),
    "EP 2 x FSDP 2, exactly the rows": (4, {EP: 2}),
    "EP 2 x HSDP 2, recomputed": (4, {EP: 2, REPLICATE: 2, AC: "full", **DEVICE}),
    "EP 2 = TP 2, FSDP 2": (4, {EP: 2, TP: 2, **DEVICE}),
    "EP 2 = TP 2": (2, {EP: 2, TP: 2}),
    "EP 2 = TP 2, HSDP 2": (4, {EP: 2, TP: 2, REPLICATE: 2}),
    "EP 2 = TP 2, CP 2": (4, {EP: 2, TP: 2, CP: 2}),
    "EP 2 = TP 2, PP 2, recomputed": (4, {EP: 2, TP: 2, PP: 2, AC: "full"}),
    "EP 2 x TP 2 with the same positions": (4, {EP: 2, TP: 2, NO_SP: "true", **DEVICE}),
    "EP 2 x PP 2, some recomputed": (4, {EP: 2, PP: 2, AC: "selective", **DEVICE}),
    "EP 2, CP 2": (2, {EP: 2, CP: 2, **DEVICE}),
    "FSDP 4 of two experts": (4, {}),
    "TP 2": (2, {TP: 2}),
    "EP 4 = TP 2 x FSDP 2, of four experts": (4, {EP: 4, TP: 2, **FOUR}),
    "EP 2 of four experts, CP 2": (2, {EP: 2, CP: 2, **FOUR}),
    "EP 2 = TP 2, PP 2, FSDP 2, of four experts": (8, {EP: 2, TP: 2, PP: 2, **FOUR}),
}
QUICK = ("EP 2 x FSDP 2", "EP 2 of four experts, CP 2")
FULL = tuple(name for name, (ranks, _) in MESHES.items() if ranks < 8)
Reference = Callable[[Mapping[str, object]], RunRecord]


def train(site: str, folder: str, overrides: dict[str, object]) -> RunRecord:
    """Train in this process; the record has the gradients of the first step."""
    os.chdir(folder)
    sys.path.insert(0, site)
    try:
        return run_recipe("moe", {"job.device": "cpu", **MOE, **TWO, **overrides}, weights=True)
    finally:
        sys.path.remove(site)


@pytest.fixture(scope="module")
def one_device(gloo: GlooPool, experts: str, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Train on one device with as many experts as the overrides say."""

    @functools.cache
    def run(args: object) -> RunRecord:
        settings = {"model.args": args, "training.steps": 6}
        return gloo.run(1, train, experts, str(tmp_path_factory.mktemp("one")), settings)[0]

    return lambda overrides: run({**TWO, **overrides}["model.args"])


@pytest.mark.parametrize("mesh", rows(MESHES, QUICK, FULL))
def test_training_is_that_of_one_device(
    gloo: GlooPool, experts: str, one_device: Reference, tmp_path: Path, mesh: str
) -> None:
    """Losses, gradients, and how many rows each expert has."""
    ranks, overrides = MESHES[mesh]
    one = one_device(overrides)
    for record in gloo.run(ranks, train, experts, str(tmp_path), overrides):
        assert record.losses == pytest.approx(one.losses[:4], rel=1e-6)
        assert record.grad_norms == pytest.approx(one.grad_norms[:4], rel=1e-6)
        assert record.statistics == one.statistics[:4]
        for name, gradient in record.gradients.items():
            expected = one.gradients[name]
            assert (gradient - expected).abs().max() <= 1e-5 * expected.abs().max(), name
    counted = one.statistics[0]["expert_rows"]
    assert [sum(layer) for layer in counted] == [8 * 32 * 2] * 2  # two experts for each token of the batch
    metrics = [json.loads(line) for line in (tmp_path / "outputs/moe/metrics.jsonl").read_text().splitlines()]
    busiest = max(max(layer) / (sum(layer) / len(layer)) for layer in counted)
    assert metrics[0]["expert_load/busiest"] == pytest.approx(busiest, rel=1e-12)


@pytest.mark.full
@pytest.mark.parametrize(
    "parts",
    [
        # Where the ranks outnumber the experts, data parallelism divides another dimension, in checkpoints too.
        [(4, {EP: 2}), (1, {}), (4, {})],
        [(4, {EP: 4, TP: 2, **FOUR}), (2, {EP: 2, TP: 2, **FOUR}), (4, {EP: 2, **FOUR})],
    ],
    ids=["two experts", "four experts"],
)
def test_shards_of_another_dimension_resume_on_another_mesh(
    gloo: GlooPool, experts: str, one_device: Reference, tmp_path: Path, parts: list[tuple[int, dict[str, object]]]
) -> None:
    one = one_device(parts[0][1])
    for stop, (ranks, mesh) in zip((2, 4, 6), parts, strict=True):
        overrides = {**mesh, "training.steps": 6, "checkpoint.enable": "true", "training.stop_at_step": stop}
        for record in gloo.run(ranks, train, experts, str(tmp_path), overrides):
            assert record.losses == pytest.approx(one.losses[stop - 2 : stop], rel=1e-6)
            assert record.grad_norms == pytest.approx(one.grad_norms[stop - 2 : stop], rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "overrides"), [(4, {EP: 2}), (4, {}), (2, {EP: 2, TP: 2}), (4, {EP: 2, TP: 2})], ids=str)
def test_no_rank_holds_more_than_the_even_share(
    gloo: GlooPool, experts: str, tmp_path: Path, ranks: int, overrides: dict[str, object]
) -> None:
    name = "blocks.0.feed_forward.experts.gate"
    settings = {**MOE, **TWO, **overrides, "training.steps": 1}
    for _, traced in gloo.run(ranks, train_with, experts, str(tmp_path), "moe", settings, [name]):
        assert traced[name][0].numel() == 2 * 32 * 24 // ranks


def gathers_before_an_exchange(site: str, folder: str) -> list[int]:
    """Return how many units FSDP has begun to gather in a step when experts first receive rows, and at the end."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from titan_core.api import hookimpl

    class Calls(TorchDispatchMode):
        names: ClassVar[list[str]] = []

        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
            self.names.append(function._schema.name)
            return function(*arguments, **(keywords or {}))

        @hookimpl
        def titan_train_start(self) -> None:
            self.__enter__()

        @hookimpl
        def titan_step_end(self) -> None:
            self.__exit__(None, None, None)

    os.chdir(folder)
    sys.path.insert(0, site)
    calls = Calls()
    settings = {**MOE, **TWO, EP: 2, "training.steps": 1, "lr_scheduler.warmup_steps": 1, "parallelism.fsdp_group_mib": 0}
    run_recipe("moe", {"job.device": "cpu", **settings}, observers=[calls])
    first = next(index for index, name in enumerate(calls.names) if "all_to_all" in name)
    gathers = [index for index, name in enumerate(calls.names) if "allgather" in name and "base" in name]
    return [sum(index < first for index in gathers), len(gathers)]


@pytest.mark.full
def test_the_next_block_is_gathered_before_the_host_waits(gloo: GlooPool, experts: str, tmp_path: Path) -> None:
    """The embedding, the first block, its experts, and the second block. Later the experts of the second block
    and the head, both blocks again for the backward pass, and the losses of the ranks."""
    assert gloo.run(4, gathers_before_an_exchange, experts, str(tmp_path)) == [[4, 11]] * 4


@pytest.mark.full
def test_a_capacity_that_does_not_suffice_fails_the_step(gloo: GlooPool, experts: str, tmp_path: Path) -> None:
    long = {**MOE, **TWO, "training.seq_len": 512, "training.local_batch_size": 4, "training.steps": 1}
    settings = {**long, EP: 2, **DEVICE, "parallelism.expert_parallel_capacity": 0.1}
    with pytest.raises(RuntimeError, match=r'training\.on_nan = "skip" skips'):
        gloo.run(2, train_with, experts, str(tmp_path), "moe", settings)


def test_a_capacity_without_its_dispatch_is_refused(gloo: GlooPool, experts: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match='dispatch "alltoall" sends as many rows as there are; remove it'):
        gloo.run(
            2, train_with, experts, str(tmp_path), "moe", {**MOE, **TWO, EP: 2, "parallelism.expert_parallel_capacity": 2.0}
        )
