"""Trains a model with dropout and records its masks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.small_gpt import small, train_model
from titan_core.api import RandomStream, current_microbatch, hookimpl
from titan_core.api.parallel.step import is_shape_inference
from titan_testing.jobs import RunRecord

ROWS, SEQ, STEPS, BLOCKS = 4, 16, 3, 4
DROPPING: dict[str, Any] = {"blocks": BLOCKS, "dropout": 0.1}
DIVIDED: dict[str, object] = {
    "training.steps": STEPS,
    "training.seq_len": SEQ,
    "model.args.n_layers": BLOCKS,
    "training.local_batch_size": 1,
    "training.global_batch_size": ROWS,
    "lr_scheduler.warmup_steps": 1,
    "training.deterministic": "true",
}
MASKS = dict[tuple[str, int], Tensor]
"""The mask of each (module, step) over the global batch: 1 for kept elements, 0 for dropped ones, -1 for those on other
ranks."""


class Masks:
    """An observer that records the masks of all modules."""

    def __init__(self) -> None:
        self.masks: MASKS = {}

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        mesh = run.world.mesh
        self.rank = mesh["tp"].get_local_rank() if "tp" in mesh else 0
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
        known = whole[there] >= 0  # from the original forward pass, if this one is a recomputation
        assert torch.equal(whole[there][known], local[known]), f"{name} draws another mask when it is recomputed"
        whole[there] = local


def train_masked(folder: str, overrides: dict[str, object]) -> tuple[RunRecord, MASKS]:
    masks = Masks()
    # Compiled code does not call our hooks.
    observers = [] if "compile.enable" in overrides else [masks]
    return train_model(folder, small(**DROPPING), {**DIVIDED, **overrides}, observers), masks.masks
