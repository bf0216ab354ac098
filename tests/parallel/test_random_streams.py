"""A model with dropout trains on any mesh, recomputed and resumed, as on one device: its masks are the same, bit for bit."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.dropping_gpt import DROPPING, DroppingGPT
from harness.gloo_pool import GlooPool
from harness.jobs import RunRecord, run_job
from harness.meshes import CP, PP, SCHEDULE, TP
from harness.small_gpt import definition, job_of
from titan_core.api.attention import CausalAttention
from titan_core.api.dropout import Dropout
from titan_core.api.errors import UserError
from titan_core.api.hookspecs import hookimpl
from titan_core.api.microbatch import current_microbatch
from titan_core.api.random_streams import RandomStream
from titan_core.api.step import is_shape_inference

ROWS, SEQ, STEPS = 4, 16, 3
DIVIDED: dict[str, object] = {
    "training.steps": STEPS,
    "training.seq_len": SEQ,
    "training.local_batch_size": 1,
    "training.global_batch_size": ROWS,
    "lr_scheduler.warmup_steps": 1,
    "training.deterministic": "true",
}
NO_SP = "parallelism.disable_sequence_parallel"
AC = "activation_checkpoint.mode"
COMPILED = {"compile.enable": "true", "compile.backend": "aot_eager"}
MASKS = dict[tuple[str, int], Tensor]
"""(module, step) -> of each element of the global batch, 1 where it was kept, 0 where dropped, -1 where it is another
rank's."""


class Masks:
    """An observer that keeps the masks of all modules."""

    def __init__(self) -> None:
        self.masks: MASKS = {}

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        mesh = run.world.mesh
        self.rank = mesh["tp"].get_local_rank() if "tp" in mesh.mesh_dim_names else 0
        for part in run.parts:
            for name, module in part.module.named_modules():
                if isinstance(module, RandomStream):
                    module.register_forward_hook(partial(self.keep, name))

    def keep(self, name: str, module: nn.Module, arguments: Any, output: Tensor) -> None:
        microbatch = current_microbatch()
        if is_shape_inference():
            return
        assert microbatch is not None and isinstance(module, RandomStream) and module._features is not None
        assert microbatch.batch.rows is not None
        local = output.detach().to_local() if isinstance(output, DTensor) else output.detach()
        local = local.flatten(2).ne(0).to(torch.int8)
        columns = microbatch.batch.columns
        columns = torch.arange(SEQ) if columns is None else columns[0]
        columns = columns if local.shape[1] == len(columns) else columns.chunk(2)[self.rank]
        first = 0 if local.shape[2] == module._features else self.rank * local.shape[2]
        whole = self.masks.setdefault(
            (name, microbatch.step), torch.full((ROWS, SEQ, module._features), -1, dtype=torch.int8)
        )
        there = (microbatch.batch.rows[:, None], columns[None], slice(first, first + local.shape[2]))
        known = whole[there] >= 0  # by a forward pass that is recomputed
        assert torch.equal(whole[there][known], local[known]), f"{name} draws something else when it is recomputed"
        whole[there] = local


def train(folder: str, overrides: dict[str, object]) -> tuple[RunRecord, MASKS]:
    os.chdir(folder)
    job = job_of(definition(DroppingGPT, DROPPING), {**DIVIDED, **overrides}, int(os.environ["WORLD_SIZE"]))
    masks = Masks()
    # What compiled code runs has no hooks of ours.
    return run_job(job, weights=True, observers=[] if "compile.enable" in overrides else [masks]), masks.masks


@pytest.fixture(scope="module")
def one_device(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunRecord, MASKS]:
    (result,) = gloo.run(1, train, str(tmp_path_factory.mktemp("one")), {})
    return result


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (1, {AC: "full"}),
        (1, {AC: "selective"}),
        (1, {"training.local_batch_size": 4}),
        (2, {}),
        (2, {TP: 2, AC: "full"}),
        (2, {TP: 2, NO_SP: "true"}),
        (2, {PP: 2, SCHEDULE: "1F1B", AC: "full"}),
        (2, {PP: 2, SCHEDULE: "ZBVZeroBubble", AC: "selective"}),
        (2, {CP: 2, AC: "selective"}),
        (4, {TP: 2, CP: 2}),
        (1, {**COMPILED, AC: "selective"}),
        (2, {**COMPILED, TP: 2, AC: "full"}),
    ],
    ids=str,
)
def test_masks_and_losses_are_those_of_one_device(
    gloo: GlooPool, one_device: tuple[RunRecord, MASKS], tmp_path: Path, ranks: int, overrides: dict[str, object]
) -> None:
    one, expected = one_device
    found: MASKS = {}
    for record, masks in gloo.run(ranks, train, str(tmp_path), overrides):
        assert record.losses == pytest.approx(one.losses, rel=1e-6)
        assert record.grad_norms == pytest.approx(one.grad_norms, rel=1e-5)
        for place, mask in masks.items():
            before = found.setdefault(place, mask)
            both = (before >= 0) & (mask >= 0)
            assert torch.equal(before[both], mask[both]), f"ranks draw different masks for the same elements of {place}"
            found[place] = torch.maximum(before, mask)
    if "compile.enable" not in overrides:
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[place], mask) for place, mask in expected.items())


def test_every_module_and_step_has_a_mask_of_its_own(one_device: tuple[RunRecord, MASKS]) -> None:
    """Else what is compared above would be equal in any case."""
    _, masks = one_device
    assert len(masks) == STEPS * (1 + 4 * 5)
    assert all(0.02 < float((mask == 0).float().mean()) < 0.2 and mask.min() == 0 for mask in masks.values())
    assert len({mask.numpy().tobytes() for mask in masks.values()}) == len(masks)


def test_a_resumed_run_draws_as_if_it_had_not_stopped(
    gloo: GlooPool, one_device: tuple[RunRecord, MASKS], tmp_path: Path
) -> None:
    one, expected = one_device
    saved = {"checkpoint.enable": "true", "checkpoint.interval": 2, "job.dump_folder": "run"}
    gloo.run(1, train, str(tmp_path), {**saved, "training.stop_at_step": 2})
    later = {place: mask for place, mask in expected.items() if place[1] > 2}
    for ranks, mesh in ((1, {}), (2, {TP: 2})):  # the same mesh and another one
        load = {**saved, "checkpoint.load_step": 2, **mesh}
        (record, masks), *_ = gloo.run(ranks, train, str(tmp_path), load)
        assert masks.keys() == later.keys()
        assert all(torch.equal(masks[place][mask >= 0], later[place][mask >= 0]) for place, mask in masks.items())
        if ranks == 1:
            assert record.losses == one.losses[2:]
            assert all(torch.equal(record.final[name], tensor) for name, tensor in one.final.items())
        else:
            assert record.losses == pytest.approx(one.losses[2:], rel=1e-6)


class SharedAttentionDropout(DroppingGPT):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention.after = block.dropout


class AcrossBlocks(DroppingGPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].dropout = self.blocks[0].dropout


class CalledTwice(DroppingGPT):
    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        h = self.embedding.dropout(self.embedding(tokens, positions))
        for block in self.blocks:
            h = block(h, documents)
        return self.output(self.norm(h))


class HeadsBeforePositions(DroppingGPT):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention.mixer = Mixer()


class Mixer(CausalAttention):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = Dropout(0.1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        return self.dropout(super().forward(q, k, v, documents))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (SharedAttentionDropout, r"'blocks\.0\.attention\.after' is also 'blocks\.0\.dropout', and would draw the same"),
        (AcrossBlocks, r"'blocks\.0\.dropout' is also 'blocks\.1\.dropout', and would draw the same numbers each time"),
        (CalledTwice, r"'embedding\.dropout' is called 2 times in a forward pass.*; give each call a module of its own"),
        (HeadsBeforePositions, r"'blocks\.0\.attention\.mixer\.dropout' draws for a tensor \[batch, seq, features\.\.\.\]"),
    ],
)
def test_modules_that_draw_the_same_twice_or_for_no_tokens_are_refused(
    in_tmp: Path, model: type[nn.Module], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run_job(job_of(definition(model, DROPPING), DIVIDED, 1))
