"""Measures the overhead of the trainer: its steady-state tokens/s, compared with a hand-written loop.

Both train the same model on batches of the same shape with the same optimizer, in one process in alternating blocks, so that
other load on the machine affects both. The loop has its batches ready; the trainer reads and tokenises its data, calls its
hooks and logs its metrics.

    uv run python benchmarks/overhead.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from titan_core.api.batch import Batch
from titan_core.api.config import Override
from titan_core.api.world import World
from titan_core.config.load import load_config
from titan_core.data.opened import OpenedData
from titan_core.job.assemble import assemble
from titan_core.plugins.lifecycle import Lifecycle
from titan_core.plugins.registry import Registry
from titan_core.runlog.run_directory import RunDirectory
from titan_core.train.trainer import Trainer
from titan_core.train.world import join_world


def hand_written(trainer: Trainer) -> Callable[[], None]:
    """Return one step of a loop as a user would write it for this model."""
    definition = trainer.job.facts.model
    model = definition.build()
    model.load_state_dict(trainer.state.parts[0].module.state_dict())
    for name, compute in definition.layout.buffers.items():
        model.get_buffer(name).copy_(compute())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    data = trainer.state.loader.next_step()
    assert data is not None
    batches: list[Batch] = data.microbatches
    num_targets = data.target_weight

    def step() -> None:
        for batch in batches:
            logits = model(batch.tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum") / num_targets
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(trainer: Trainer, world: World, rounds: int, block: int) -> tuple[float, float]:
    """Return the median seconds per step of the loop and of the trainer."""
    trainer.lifecycle.train_start(trainer.run_start())
    loop = hand_written(trainer)
    contenders: dict[str, Callable[[], object]] = {"loop": loop, "trainer": trainer.step}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for step in contenders.values():
        for _ in range(3):
            step()
    for number in range(rounds):
        order = list(contenders.items())
        for name, step in order if number % 2 else reversed(order):
            started = time.perf_counter()
            for _ in range(block):
                step()
            seconds[name].append((time.perf_counter() - started) / block)
    return statistics.median(seconds["loop"]), statistics.median(seconds["trainer"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--block", type=int, default=3, help="steps per block")
    arguments = parser.parse_args()
    settings = {"job.dump_folder": tempfile.mkdtemp(), "training.steps": "100000"}
    settings |= {"checkpoint.enable": "false", "sample.enable": "false"}
    overrides = [Override(key, value) for key, value in settings.items()]
    config, registry = load_config("llama3_debug", overrides, Registry.from_installed())
    job = assemble(config, registry, 1)
    with join_world(job) as world:
        lifecycle = Lifecycle([debugger.build.load()(debugger.context(job.facts)) for debugger in job.debuggers])
        trainer = Trainer(job, world, OpenedData.of(job), lifecycle, RunDirectory.create(job.dump_folder))
        loop, ours = measure(trainer, world, arguments.rounds, arguments.block)
        trainer.close()
    tokens = job.facts.batch.tokens_per_step
    print(f"\ntorch {torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} CPUs, device {world.device}")
    print(f"hand-written loop  {tokens / loop:10,.0f} tokens/s")
    print(f"titan's trainer    {tokens / ours:10,.0f} tokens/s")
    print(f"ratio of medians   {loop / ours:10.4f}")


if __name__ == "__main__":
    main()
