"""What watching costs: the trainer's tokens/s with all default metrics, loggers and debug plugins, over those without any;
and what the lifecycle hooks of a step cost where no debug plugin listens.

Both trainers take their steps in one process, in blocks that alternate, so that what else the machine does hits both.
Metrics are logged every step, ten times as often as by default.

    uv run python benchmarks/metrics.py
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import tempfile
import time
from dataclasses import replace

import torch

from titan_core.api.config import Override
from titan_core.api.events import PendingUpdate, StepReport
from titan_core.api.job import Job
from titan_core.api.world import World
from titan_core.config.load import load_config
from titan_core.data.opened import OpenedData
from titan_core.job.assemble import assemble
from titan_core.plugins.lifecycle import Lifecycle
from titan_core.plugins.registry import Registry
from titan_core.runlog.run_directory import RunDirectory
from titan_core.train.trainer import Trainer
from titan_core.train.world import join_world


def make_job(plugins: str) -> Job:
    """The debug recipe, with metrics every step; ``plugins`` are switched off."""
    settings = {
        "job.dump_folder": tempfile.mkdtemp(),
        "training.steps": "100000",
        "metrics.log_freq": "1",
        "plugins.disable": plugins,
    }
    config, registry = load_config("llama3_debug", [Override(*one) for one in settings.items()], Registry.from_installed())
    return assemble(config, registry, 1)


def make_trainer(job: Job, world: World) -> Trainer:
    """With the observers that the job has."""
    lifecycle = Lifecycle([*(one.build.load()(one.context(job.facts)) for one in job.debuggers)])
    trainer = Trainer(job, world, OpenedData.of(job), lifecycle, RunDirectory.create(job.dump_folder))
    if not job.loggers:
        lifecycle.unregister(trainer.metrics)
        lifecycle.unregister(trainer.events)
    lifecycle.job_assembled(job)
    lifecycle.train_start(trainer.run_start())
    return trainer


def seconds_per_step(trainers: dict[str, Trainer], rounds: int, block: int) -> dict[str, list[float]]:
    """Of each trainer, a figure a round."""
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for trainer in trainers.values():
        for _ in range(3):
            trainer.step()
    for number in range(rounds):
        order = list(trainers.items())
        for name, trainer in order if number % 2 else reversed(order):
            started = time.perf_counter()
            for _ in range(block):
                trainer.step()
            seconds[name].append((time.perf_counter() - started) / block)
    return seconds


def hooks(lifecycle: Lifecycle, repeats: int = 20_000) -> float:
    """Seconds that the hooks of a step take."""
    zero = torch.zeros(1)
    pending = PendingUpdate(1, zero, zero, zero, [], lambda *_: zero)  # type: ignore[arg-type]
    report = StepReport(1, zero, zero, zero, 0.0, 1, 0, 0.0)
    started = time.perf_counter()
    for step in range(1, repeats + 1):
        lifecycle.step_start(step)
        lifecycle.before_update(pending)
        lifecycle.step_end(report)
    return (time.perf_counter() - started) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--block", type=int, default=3, help="steps in a block")
    arguments = parser.parse_args()
    watched = make_job("[]")
    bare = replace(make_job("['debug']"), loggers=(), debuggers=())
    with join_world(watched) as world, contextlib.redirect_stdout(io.StringIO()):
        trainers = {"bare": make_trainer(bare, world), "watched": make_trainer(watched, world)}
        seconds = seconds_per_step(trainers, arguments.rounds, arguments.block)
        watched_hooks = trainers["watched"].lifecycle
        watched_hooks.unregister(trainers["watched"].metrics)
        debugged = hooks(watched_hooks)
        for trainer in trainers.values():
            trainer.close()
    nobody = hooks(Lifecycle(plugin.module for plugin in bare.registry.found.plugins))
    tokens = watched.facts.batch.tokens_per_step
    medians = {name: statistics.median(figures) for name, figures in seconds.items()}
    ratios = [bare / watched for bare, watched in zip(seconds["bare"], seconds["watched"], strict=True)]
    print(f"\ntorch {torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} CPUs, device {world.device}")
    for name, median in medians.items():
        print(f"{name:8} {tokens / median:10,.0f} tokens/s")
    print(f"ratio of medians    {medians['bare'] / medians['watched']:.4f}")
    print(f"median of ratios    {statistics.median(ratios):.4f}")
    print(f"hooks of a step     {nobody * 1e6:.2f} microseconds with no debug plugin selected")
    print(f"                    {debugged * 1e6:.2f} microseconds with those that are on by default")
    observers = ", ".join(one.name for one in (*watched.loggers, *watched.debuggers))
    print(f"watched by          {observers}")


if __name__ == "__main__":
    main()
