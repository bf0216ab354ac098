"""Small blocks that FSDP gathers together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness import odd_gpts, small_gpt
from harness.fake_ranks import Operators, build_on_fake_ranks, fake_ranks
from harness.objectives import first_step
from titan_core.api import Batch
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord

LAYERS, DIM, FFN = 4, 32, 64
BLOCK = 3 * DIM * DIM + 3 * DIM * FFN + 2 * DIM
MIB = 4 * BLOCK / 2**20
SETTINGS: dict[str, object] = {
    "model.args": f"{{dim = {DIM}, n_layers = {LAYERS}, n_heads = 4, n_kv_heads = 2, ffn_dim = {FFN}}}",
    "training.seq_len": 16,
    "training.local_batch_size": 2,
}
GROUP, ALWAYS = "parallelism.fsdp_group_mib", "parallelism.fsdp_reshard_after_forward"
# No graph is compiled here, where a dispatch mode counts operators.
COMPILED = {"compile.enable": "true", "compile.backend": "eager", "compile.fullgraph": "false"}


@pytest.fixture
def two_ranks() -> Iterator[None]:
    with fake_ranks(2):
        yield


@pytest.mark.quick_rows(3)
@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(
    ("overrides", "gathers", "again"),
    [
        ({}, 1, 0),
        ({"model.args.tie_embeddings": "true"}, 1, 0),
        ({ALWAYS: "always"}, 1, 1),
        # Besides the blocks: the embedding, which backward does not need, and the head, which stays gathered, as do the last
        # of several blocks.
        ({GROUP: 2.1 * MIB}, 2 + 2, 1),
        ({GROUP: 2.1 * MIB, "training.mixed_precision_param": "bfloat16"}, 1 + 2, 0),
        ({GROUP: 2.1 * MIB, ALWAYS: "always"}, 2 + 2, 2 + 1),
        ({GROUP: 0.9 * MIB}, LAYERS + 2, LAYERS),
        ({GROUP: 0}, LAYERS + 2, LAYERS),
        (COMPILED, LAYERS + 2, LAYERS),
    ],
    ids=str,
)
def test_small_blocks_share_gathers(overrides: dict[str, object], gathers: int, again: int) -> None:
    part = build_on_fake_ranks({**SETTINGS, **overrides})[0]
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    with Operators() as forward:
        loss = part.forward_loss(first_step(Batch(tokens, tokens)))
    with Operators() as backward:
        loss.backward()
    assert forward.collectives["_allgather_base_"] == gathers
    assert backward.collectives["_allgather_base_"] == again
    assert backward.collectives["_reduce_scatter_base_"] == gathers


def train(folder: str, model: str, overrides: dict[str, object]) -> RunRecord:
    brief = {"training.steps": 4, "training.global_batch_size": 4, "lr_scheduler.warmup_steps": 1}
    return small_gpt.train_model(folder, small_gpt.definition(getattr(odd_gpts, model)), {**brief, **overrides})


VALIDATION = {"validation.enable": "true", "validation.dataset": "stdlib", "validation.freq": 1, "validation.steps": 1}


@pytest.mark.parametrize("model", ["LayerDrop", "Backwards"])
@pytest.mark.parametrize("overrides", [{}, {**VALIDATION, "activation_checkpoint.mode": "full"}], ids=["plain", "validated"])
def test_blocks_that_do_not_run_in_order_train_as_on_one_device(
    gloo: GlooPool, tmp_path: Path, model: str, overrides: dict[str, object]
) -> None:
    (one,) = gloo.run(1, train, str(tmp_path), model, overrides)
    for many in gloo.run(2, train, str(tmp_path), model, overrides):
        assert many.losses == pytest.approx(one.losses, rel=1e-5)
        assert many.grad_norms == pytest.approx(one.grad_norms, rel=1e-4)


def test_blocks_of_different_dtypes_are_gathered_apart(gloo: GlooPool, tmp_path: Path) -> None:
    apart, grouped = (
        gloo.run(2, train, str(tmp_path), "first_block_in_bfloat16", {"training.steps": 2, **overrides})[0]
        for overrides in ({GROUP: 0}, {})
    )
    assert apart.losses == grouped.losses
