"""Measures the bubble of each pipeline schedule.

Blocks sleep instead of computing, for the same time in forward, in backward for the input gradient, and in backward for the
weight gradients. So the results depend only on the order of the schedule, not on the number of cores.

    uv run torchrun --nproc-per-node 4 benchmarks/schedules.py
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from titan_core.api import Batch, StepInput, Transform
from titan_core.api.config.resolved import Override
from titan_core.api.parallel.step import GradientAccumulation
from titan_core.config.load import load_config
from titan_core.job.assemble import assemble
from titan_core.loop.world import join_world
from titan_core.model.build import build_parts
from titan_core.plugins.registry import Components
from titan_parallel.pipeline import make_step
from titan_parallel.pipeline_plan import SCHEDULES

BLOCKS = 8


class SleepForward(torch.autograd.Function):
    """Sleeps in forward, and in backward when the input gradient is computed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class SleepBackward(torch.autograd.Function):
    """Sleeps only in backward, when a weight gradient is computed."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


def let_sleep(block: nn.Module, seconds: float) -> None:
    """Make the block sleep instead of computing."""
    weight = next(parameter for parameter in block.parameters() if parameter.dim() == 1)

    def forward(hidden: Tensor, *arguments: Any) -> Tensor:
        return SleepForward.apply(hidden, seconds) * SleepBackward.apply(weight, seconds)

    block.forward = forward  # type: ignore[assignment]


def measure(schedule: str, microbatches: int, seconds: float, rounds: int) -> float:
    """Return the median seconds per step."""
    overrides = {
        "parallelism.pipeline_parallel_degree": os.environ["WORLD_SIZE"],
        "parallelism.pipeline_parallel_schedule": schedule,
        "model.args": f"{{dim = 16, n_layers = {BLOCKS}, n_heads = 2, n_kv_heads = 2, ffn_dim = 16, vocab_size = 258}}",
        "training.local_batch_size": microbatches,
        "training.global_batch_size": microbatches,
        "training.seq_len": 8,
        "job.device": "cpu",
    }
    given = [Override(key, str(value)) for key, value in overrides.items()]
    config, registry = load_config("llama3_debug", given, Components.from_installed())
    job = assemble(config, registry, int(os.environ["WORLD_SIZE"]))
    with join_world(job) as world:
        pipeline = registry.get(Transform, "pipeline_parallel")
        parts = build_parts(job, world.mesh, world.device)
        for part in parts:
            for block in part.blocks().values():
                let_sleep(block, seconds)
        plain = GradientAccumulation(parts[0])
        step = make_step(plain, parts, pipeline.training_context(job, world.mesh, world.device))
        tokens = torch.zeros(microbatches, 8, dtype=torch.int64)
        times = []
        for _ in range(rounds + 1):
            world.sum(torch.zeros(1))  # a barrier
            started = time.perf_counter()
            step(StepInput([Batch(tokens, tokens)], 1, 0, tokens.numel()))
            world.sum(torch.zeros(1))
            times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--milliseconds", type=float, default=10.0, help="time that a block sleeps")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("titan_parallel").setLevel(logging.ERROR)
    ranks, seconds = int(os.environ["WORLD_SIZE"]), arguments.milliseconds / 1000
    busy = 3 * seconds * arguments.microbatches * BLOCKS / ranks
    rows = []
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # each job has its own store
    for schedule in SCHEDULES:
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        took = measure(schedule, arguments.microbatches, seconds, arguments.rounds)
        rows.append(f"| {schedule} | {took * 1000:,.0f} | {1 - busy / took:.1%} |")
    if os.environ["RANK"] == "0":
        print(
            f"\ntorch {torch.__version__}; {ranks} ranks, {BLOCKS} blocks of {arguments.milliseconds:g} ms forward and twice"
        )
        print(f"that backward, {arguments.microbatches} microbatches; {busy * 1000:,.0f} ms per step without bubble\n")
        print("\n".join(["| schedule | ms per step | bubble |", "| --- | --- | --- |", *rows]))


if __name__ == "__main__":
    main()
