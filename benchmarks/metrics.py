"""Measures the cost of observing a run: the trainer's tokens/s with the default metrics, loggers and debug plugins, compared
with a trainer without them; and the time of a step's lifecycle hooks if no debug plugin implements them.

Both trainers run in one process in alternating blocks of steps, so that other load on the machine affects both. Metrics are
logged every step, ten times as often as by default.

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

from titan_core.api import PendingUpdate, StepReport, World
from titan_core.api.config.resolved import Override
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.config.load import load_config
from titan_core.data.streams import OpenedData
from titan_core.job.assemble import assemble
from titan_core.loop.trainer import Trainer
from titan_core.loop.world import join_world
from titan_core.plugins.lifecycle import Lifecycle
from titan_core.plugins.registry import Components
from titan_core.runlog.run_directory import RunDirectory


def make_job(plugins: str) -> AssembledJob:
    """Assemble the debug recipe with metrics every step and with ``plugins`` disabled."""
    settings = {
        "job.dump_folder": tempfile.mkdtemp(),
        "training.steps": "100000",
        "metrics.log_freq": "1",
        "checkpoint.enable": "false",
        "sample.enable": "false",
        "plugins.disable": plugins,
    }
    overrides = [Override(key, value) for key, value in settings.items()]
    config, registry = load_config("llama3_debug", overrides, Components.from_installed())
    return assemble(config, registry, 1)


def make_trainer(job: AssembledJob, world: World) -> Trainer:
    """Build a trainer with the observers of the job."""
    lifecycle = Lifecycle([debugger.build.load()(debugger.context(job)) for debugger in job.observers])
    trainer = Trainer(job, world, OpenedData.of(job), lifecycle, RunDirectory.create(job.dump_folder))
    if not job.loggers:
        lifecycle.unregister(trainer.metrics)
        lifecycle.unregister(trainer.events)
    lifecycle.job_assembled(job)
    lifecycle.train_start(trainer.run_start())
    return trainer


def seconds_per_step(trainers: dict[str, Trainer], rounds: int, block: int) -> dict[str, list[float]]:
    """Return the seconds per step of each trainer, one value per round."""
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
    """Return the seconds that the hooks of a step take."""
    zero = torch.zeros(1)
    pending = PendingUpdate(1, zero, zero, zero, [], lambda *_: zero, contextlib.nullcontext)  # type: ignore[arg-type]
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
    parser.add_argument("--block", type=int, default=3, help="steps per block")
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
    tokens = watched.batch.tokens_per_step
    medians = {name: statistics.median(figures) for name, figures in seconds.items()}
    ratios = [bare / watched for bare, watched in zip(seconds["bare"], seconds["watched"], strict=True)]
    print(f"\ntorch {torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} CPUs, device {world.device}")
    for name, median in medians.items():
        print(f"{name:8} {tokens / median:10,.0f} tokens/s")
    print(f"ratio of medians    {medians['bare'] / medians['watched']:.4f}")
    print(f"median of ratios    {statistics.median(ratios):.4f}")
    print(f"hooks of a step     {nobody * 1e6:.2f} microseconds with no debug plugin selected")
    print(f"                    {debugged * 1e6:.2f} microseconds with the default debug plugins")
    observers = ", ".join(component.name for component in (*watched.loggers, *watched.debuggers))
    print(f"observers           {observers}")


if __name__ == "__main__":
    main()
