"""Tensor parallelism computes the gradient of every parameter as one device does, with shards of different sizes too."""

from __future__ import annotations

import os
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from harness.objectives import first_step
from titan_core.api import Batch, UserError, World
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.loop.world import join_world
from titan_core.model.build import build_parts
from titan_parallel import regather, region_collectives
from titan_parallel.local_parameters import divide_embedding, divide_parameters
from titan_parallel.region_collectives import Ranks, ReplicatedPositions, ShardedPositions, gather_columns
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import make_job, whole

SEQ = 16
# Grouped-query attention, and features and a vocabulary that two ranks divide unevenly.
MODEL: dict[str, object] = {
    "model.args": "{dim = 32, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 33, vocab_size = 259}",
    "training.seq_len": SEQ,
    "training.local_batch_size": 2,
    "job.device": "cpu",
}
NO_SP: dict[str, object] = {"parallelism.disable_sequence_parallel": "true"}
NO_LOSS: dict[str, object] = {"parallelism.disable_loss_parallel": "true"}
TIED = {"model.args.tie_embeddings": "true"}
VARIANTS: list[dict[str, object]] = [{}, NO_SP, NO_LOSS, {**NO_SP, **NO_LOSS}]


def gradients(folder: str, variants: list[dict[str, object]]) -> list[dict[str, Tensor]]:
    """Return the full gradients of the model in each variant, after two microbatches of the same batch."""
    os.chdir(folder)
    size = int(os.environ["WORLD_SIZE"])
    mesh = {"parallelism.tensor_parallel_degree": min(size, 2), "training.global_batch_size": 2 * max(1, size // 2)}
    jobs = [make_job("tiny", {**MODEL, **mesh, **overrides}, size) for overrides in variants]
    with join_world(jobs[0]) as world:
        return [gradients_of(job, world) for job in jobs]


def gradients_of(job: AssembledJob, world: World) -> dict[str, Tensor]:
    (part,) = build_parts(job, world.mesh, world.device)
    tokens = torch.arange(2 * SEQ).view(2, SEQ) * 7 % 259
    for _ in range(2):
        part.forward_loss(first_step(Batch(tokens, tokens.roll(1)))).backward()
    for transform in job.transforms:
        if transform.steps.observer is not None:
            context = transform.training_context(job, world.mesh, world.device)
            observer: Any = transform.steps.observer.load()([part], context)
            observer.titan_gradients_complete(1)
    named = part.module.named_parameters()
    return {name: whole(parameter.grad) for name, parameter in named if parameter.grad is not None}


@pytest.mark.parametrize(("ranks", "factor"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.full)])
def test_gradients_of_every_parameter(gloo: GlooPool, tmp_path: Any, ranks: int, factor: int) -> None:
    """Four ranks: FSDP adds the gradients of two replicas of the batch."""
    variants = [{**variant, **tied} for tied in ({}, TIED) for variant in VARIANTS]
    one, tied = gloo.run(1, gradients, str(tmp_path), [{}, TIED])[0]
    for variant, many in zip(variants, gloo.run(ranks, gradients, str(tmp_path), variants)[0], strict=True):
        expected = tied if "model.args.tie_embeddings" in variant else one
        assert many.keys() == expected.keys()
        for name, gradient in expected.items():
            assert (many[name] / factor - gradient).norm() <= 1e-6 * gradient.norm(), (variant, name)


def gradients_by_row(folder: str, variants: list[dict[str, object]]) -> list[dict[str, Tensor]]:
    """As :func:`gradients`, with every sequence treated as a large one."""
    before, region_collectives.LARGE_ROW = region_collectives.LARGE_ROW, 0
    try:
        return gradients(folder, variants)
    finally:
        region_collectives.LARGE_ROW = before


RESHARD = "parallelism.tensor_parallel_reshard_after_forward"


def kept_inputs(folder: str, variants: list[dict[str, object]], row: int) -> list[tuple[int, int, dict[str, Tensor]]]:
    """Return, for each variant, how many gathered inputs are alive after a forward pass, how often backward gathers one, and
    the gradients."""
    os.chdir(folder)
    enter, start = ShardedPositions.enter, region_collectives.start_gather
    gathered: list[weakref.ref[Tensor]] = []
    again: list[Ranks] = []

    def entered(self: ShardedPositions, hidden: Tensor) -> Tensor:
        whole = enter(self, hidden)
        gathered.append(weakref.ref(whole))
        return whole

    def started(share: Tensor, ranks: Ranks) -> Any:
        again.append(ranks)
        return start(share, ranks)

    found = []
    before, region_collectives.LARGE_ROW = region_collectives.LARGE_ROW, row
    with (
        mock.patch.object(ShardedPositions, "enter", entered),
        mock.patch.object(regather, "start_gather", started),
        join_world(make_job("tiny", {**MODEL, "parallelism.tensor_parallel_degree": 2}, 2)) as world,
    ):
        for variant in variants:
            job = make_job("tiny", {**MODEL, "parallelism.tensor_parallel_degree": 2, **variant}, 2)
            (part,) = build_parts(job, world.mesh, world.device)
            gathered.clear()
            again.clear()
            tokens = torch.arange(2 * SEQ).view(2, SEQ) * 7 % 259
            loss = part.forward_loss(first_step(Batch(tokens, tokens.roll(1))))
            alive = sum(reference() is not None for reference in gathered)
            loss.backward()
            grads = {name: whole(p.grad) for name, p in part.module.named_parameters() if p.grad is not None}
            found.append((alive, len(again), grads))
    region_collectives.LARGE_ROW = before
    return found


@pytest.mark.parametrize("row", [region_collectives.LARGE_ROW, 0], ids=["whole batch", "by sequence"])
def test_inputs_of_regions_are_gathered_again_for_backward(gloo: GlooPool, tmp_path: Any, row: int) -> None:
    """Of two blocks with two regions each, and a head, which keeps its input."""
    modes = ("none", "selective", "full")
    policies = ("never", "default", "always")
    variants = [{"activation_checkpoint.mode": mode, RESHARD: policy} for mode in modes for policy in policies]
    found = gloo.run(2, kept_inputs, str(tmp_path), variants, row)[0]
    counts = {tuple(variant.values()): one[:2] for variant, one in zip(variants, found, strict=True)}
    assert counts == {
        ("none", "never"): (5, 0),
        ("none", "default"): (1, 4),
        ("none", "always"): (1, 4),
        ("selective", "never"): (1, 0),
        ("selective", "default"): (1, 0),
        ("selective", "always"): (1, 4),
        ("full", "never"): (1, 0),
        ("full", "default"): (1, 0),
        ("full", "always"): (1, 4),
    }
    expected = found[0][2]
    for variant, (_, _, grads) in zip(variants, found, strict=True):
        assert grads.keys() == expected.keys()
        for name, gradient in expected.items():
            assert torch.equal(grads[name], gradient), (variant, name)


@pytest.mark.full
def test_large_sequences_are_gathered_and_scattered_one_by_one(gloo: GlooPool, tmp_path: Any) -> None:
    modes: list[dict[str, object]] = [{"activation_checkpoint.mode": mode} for mode in ("none", "selective", "full")]
    variants = [*modes, {"training.mixed_precision_param": "bfloat16"}]
    for variant, whole_batch, by_row in zip(
        variants,
        gloo.run(2, gradients, str(tmp_path), variants)[0],
        gloo.run(2, gradients_by_row, str(tmp_path), variants)[0],
        strict=True,
    ):
        assert whole_batch.keys() == by_row.keys()
        for name, gradient in whole_batch.items():
            assert torch.equal(by_row[name], gradient), (variant, name)


def uneven(sharded: bool) -> list[float]:
    """Return the largest differences of an embedding and a head with 9 tokens on 4 ranks, of which the last has none."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (4,))
    ranks = Ranks(mesh)
    positions = ShardedPositions(ranks) if sharded else ReplicatedPositions(ranks)
    embedding, head = nn.Embedding(9, 4, padding_idx=5), nn.Linear(4, 9)
    tokens = torch.tensor([[0, 2, 3, 5, 6, 8, 8, 1]])
    expected = F.log_softmax(head(embedding(tokens)), -1)
    expected[..., 3].sum().backward()
    wholes = [embedding.weight.grad, head.weight.grad, head.bias.grad]
    for module in (embedding, head):
        module.zero_grad()
    divide_embedding(embedding, "embedding", mesh, positions)
    divide_parameters(head, mesh, {"weight": Shard(0), "bias": Shard(0)})
    found = F.log_softmax(gather_columns(head(positions.enter(embedding(tokens))), ranks, 9), -1)
    found[..., 3].sum().backward()
    differences = [(found - expected).abs().max().item()]
    parameters = [*embedding.parameters(), *head.parameters()]
    for parameter, gradient in zip(parameters, wholes, strict=True):
        assert isinstance(parameter.grad, DTensor) and gradient is not None
        differences.append((parameter.grad.full_tensor() - gradient).abs().max().item())
    return differences


def uneven_in_world(folder: str, sharded: bool) -> list[float]:
    os.chdir(folder)
    with join_world(make_job("tiny", {"job.device": "cpu"}, 4)):
        return uneven(sharded)


@pytest.mark.parametrize("sharded", [True, False])
def test_a_vocabulary_of_which_the_last_rank_has_nothing(gloo: GlooPool, tmp_path: Any, sharded: bool) -> None:
    for differences in gloo.run(4, uneven_in_world, str(tmp_path), sharded):
        assert max(differences) < 1e-6


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str)
def test_an_embedding_that_depends_on_all_tokens_is_refused(option: dict[str, Any]) -> None:
    embedding = nn.Embedding(8, 4, **option)
    with pytest.raises(UserError, match=f"module 'embed' of the model: has {next(iter(option))}, which tensor parallelism"):
        divide_embedding(embedding, "embed", None, None)  # type: ignore[arg-type]
