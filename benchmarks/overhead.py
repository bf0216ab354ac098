"""Compares Titan's trainer with a bare loop in plain torch (``benchmarks/gpu/bare_loop.py``): the same model, weights,
tokens, optimizer and schedule, and therefore the same losses, which is checked. Both train in the same process, in
alternating blocks of steps, so that other load on the machine affects both; ranks meet at a barrier before and after each
block. The bare loop has its batches ready; the trainer reads and tokenises its data, calls its hooks and logs its metrics.

    uv run python -m benchmarks.overhead                          # one device
    uv run python -m benchmarks.overhead --processes 5 --rounds 4 # the same number of rounds, over 5 processes
    uv run python -m benchmarks.overhead --compile
    uv run python -m benchmarks.overhead --nproc 2                # two gloo ranks; the bare loop uses FSDP2
    uv run python -m benchmarks.overhead --nproc 2 --compile
    uv run python -m benchmarks.overhead --memory                 # bytes at the peak of a step, on one device
    uv run python -m benchmarks.overhead --tiny --profile 40      # where the host time of the trainer's steps goes

Each takes less than five minutes on two cores. A ratio is the median over the rounds of the bare loop's time divided by the
trainer's: above 1, the trainer is faster. CPU time is that of all threads of all ranks: the steadier figure on a loaded
machine. On a quiet one wall time counts. Where a process has placed its weights in memory speeds one of the two up by 1 or
2 % for as long as it lives: the median over several processes is steadier.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.gpu.bare_loop import BareLoop
from titan_core.api import Batch, OptimizerSection, RunEnd, StepReport, hookimpl
from titan_core.api.config.resolved import Override
from titan_core.api.config.sections import TrainingSection
from titan_core.config.load import load_config
from titan_core.data.loader import data_loader
from titan_core.data.streams import OpenedData
from titan_core.job.assemble import assemble
from titan_core.loop.trainer import Trainer
from titan_core.loop.world import join_world
from titan_core.plugins.lifecycle import Lifecycle
from titan_core.plugins.registry import Components
from titan_core.runlog.run_directory import RunDirectory

SHAPES = {"training.seq_len": "256", "training.local_batch_size": "16"}
TINY = {
    "model.args": "{dim = 64, n_layers = 6, n_heads = 4, n_kv_heads = 2, ffn_dim = 128}",
    "training.seq_len": "32",
    "training.local_batch_size": "2",
}
"""Kernels take almost no time, and the host's own work remains."""
LARGE_VOCABULARY = {
    "model.args": "{vocab_size = 16384}",
    "training.seq_len": "256",
    "training.local_batch_size": "8",
    "objective.chunk_tokens": "256",
}
"""Logits of a whole batch take 128 MiB, those of a chunk 16 MiB."""
WARM_UP = 3
"""Steps of each before the first round, whose losses are compared."""


class FirstLosses:
    """Collects losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    @hookimpl
    def titan_step_end(self, report: StepReport) -> None:
        """Keep the loss of the step."""
        self.losses.append(report.loss.item())


class Contenders:
    """Titan's trainer, and a bare loop with the same weights and data."""

    def __init__(self, trainer: Trainer, opened: OpenedData, steps: int) -> None:
        """
        Args:
            steps: steps that the bare loop can take.
        """
        self.trainer = trainer
        loader = data_loader(trainer.job, opened.training, trainer.world.data_rank)
        data = [loader.next_step() for _ in range(steps)]
        loader.close()
        self._batches: Iterator[Batch] = iter([batch for step in data if step is not None for batch in step.microbatches])
        self._loop, self._scheduler = bare_loop(trainer)
        trainer.lifecycle.train_start(trainer.run_start())
        trainer.requests.complete(trainer.world)

    def bare_step(self) -> Tensor:
        """Take a step of the bare loop; return its loss on this rank."""
        batch = next(self._batches)
        loss, _ = self._loop.step(batch.tokens, batch.targets)
        self._scheduler.step()
        return loss

    def warm_up(self) -> None:
        """Take the first steps of both.

        Raises:
            RuntimeError: their losses differ, so they do not train the same.
        """
        world, seen = self.trainer.world, FirstLosses()
        self.trainer.lifecycle.register(seen)
        for _ in range(WARM_UP):
            self.trainer.step()
        self.trainer.lifecycle.unregister(seen)
        bare = [(world.sum(self.bare_step().clone()) / world.size).item() for _ in range(WARM_UP)]
        torch.testing.assert_close(torch.tensor(seen.losses), torch.tensor(bare), rtol=1e-4, atol=0.0)


def bare_loop(trainer: Trainer) -> tuple[BareLoop, LambdaLR]:
    """Return the loop that a user would write for the trainer's model, and its schedule."""
    config, definition = trainer.job.config, trainer.job.model
    optimizer = config.section(OptimizerSection)
    model: Any = definition.build()
    model.load_state_dict({name: whole(value) for name, value in trainer.state.parts[0].module.state_dict().items()})
    for name, compute in definition.layout.buffers.items():
        model.get_buffer(name).copy_(compute())
    blocks: list[nn.Module] = list(model.get_submodule(definition.layout.blocks).children())
    if trainer.world.size > 1:
        mesh = init_device_mesh("cpu", (trainer.world.size,))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    loop = BareLoop(
        model,
        dtype=torch.float32,
        compilation="blocks" if config.value("compile.enable") else "none",
        blocks=blocks,
        lr=optimizer.lr,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_norm=config.section(TrainingSection).max_norm,
    )
    schedule = trainer.state.lr_scheduler
    assert isinstance(schedule, LambdaLR)
    return loop, LambdaLR(loop.optimizer, schedule.lr_lambdas[0])


def whole(value: Tensor) -> Tensor:
    """Return the whole tensor, of which each rank may have a shard."""
    return value.full_tensor() if isinstance(value, DTensor) else value


@contextmanager
def contenders(settings: dict[str, str], steps: int, folder: str) -> Iterator[Contenders]:
    """Join the other ranks, if any, and build the trainer and the bare loop.

    Args:
        settings: of the recipe llama3_debug.
        steps: steps that the bare loop can take.
        folder: the run directory, the same on all ranks.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    overrides = {
        **settings,
        "job.dump_folder": folder,
        "training.global_batch_size": str(ranks * int(settings["training.local_batch_size"])),
        "training.mixed_precision_param": "float32",
        "training.steps": "100000",
        "checkpoint.enable": "false",
        "sample.enable": "false",
    }
    given = [Override(key, value) for key, value in overrides.items()]
    job = assemble(*load_config("llama3_debug", given, Components.from_installed()), ranks)
    with join_world(job) as world:
        opened = OpenedData.of(job)
        lifecycle = Lifecycle([debugger.build.load()(debugger.context(job)) for debugger in job.observers])
        trainer = Trainer(job, world, opened, lifecycle, RunDirectory.create(folder))
        try:
            yield Contenders(trainer, opened, steps)
        finally:
            lifecycle.train_end(RunEnd(trainer.state.step, completed=False, reason="measured"))
            trainer.close()


@dataclass
class Times:
    """Seconds of a step in each round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def measure(self, step: Callable[[], object], steps: int, meet: Callable[[], object]) -> None:
        """Time a block of ``steps`` steps, between two barriers."""
        meet()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        meet()
        self.wall.append((time.perf_counter() - wall) / steps)
        self.cpu.append((time.process_time() - cpu) / steps)


def measure(both: Contenders, rounds: int, block: int) -> tuple[Times, Times]:
    """Return the times of the bare loop and of the trainer. CPU times are sums over ranks."""
    world = both.trainer.world
    meet: Callable[[], object] = dist.barrier if world.size > 1 else lambda: None
    bare, ours = Times(), Times()
    both.warm_up()
    for number in range(rounds):
        order = [(bare, both.bare_step), (ours, both.trainer.step)]
        for times, step in order if number % 2 else reversed(order):
            times.measure(step, block, meet)
    for times in (bare, ours):
        times.cpu = world.sum(torch.tensor(times.cpu)).tolist()
    return bare, ours


def peak_bytes(step: Callable[[], object]) -> int:
    """Return the most bytes that torch's CPU allocator has handed out at once in a step, beyond those before it:
    activations, gradients and temporary tensors. Weights and optimizer state must have been allocated."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    changes = [(event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"]
    now = peak = 0
    for _, change in sorted(changes, key=lambda change: change[0]):
        now += change
        peak = max(peak, now)
    return peak


def peaks(settings: dict[str, str], folder: str) -> tuple[int, int]:
    """Return :func:`peak_bytes` of the bare loop and of the trainer."""
    with contenders(settings, WARM_UP + 1, folder) as both:
        both.warm_up()
        return peak_bytes(both.bare_step), peak_bytes(both.trainer.step)


def profile(both: Contenders, lines: int) -> None:
    """Print the functions in which the trainer's steps spend most of their time."""
    both.warm_up()
    with cProfile.Profile() as profiler:
        for _ in range(50):
            both.trainer.step()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(lines)


def ratio(bare: list[float], ours: list[float]) -> float:
    """Return the median over the rounds of the bare loop's time divided by the trainer's."""
    return statistics.median(theirs / mine for theirs, mine in zip(bare, ours, strict=True))


def report(both: Contenders, bare: Times, ours: Times) -> None:
    """Print a table."""
    tokens, world = both.trainer.job.batch.tokens_per_step, both.trainer.world
    wall, cpu = ratio(bare.wall, ours.wall), ratio(bare.cpu, ours.cpu)
    print(
        f"\ntorch {torch.__version__}, {world.size} ranks, {torch.get_num_threads()} threads each, {os.cpu_count()} CPUs, "
        f"load {os.getloadavg()[0]:.1f}; {len(bare.wall)} rounds, {tokens:,} tokens a step\n"
    )
    print("| | tokens/s | ms of a step | CPU ms of a step |\n| --- | ---: | ---: | ---: |")
    for name, times in (("bare loop", bare), ("Titan's trainer", ours)):
        seconds, cpu_seconds = statistics.median(times.wall), statistics.median(times.cpu)
        print(f"| {name} | {tokens / seconds:,.0f} | {1e3 * seconds:.2f} | {1e3 * cpu_seconds:.2f} |")
    print(f"| bare loop / trainer, median of rounds | | {wall:.4f} | {cpu:.4f} |")


def in_processes(number: int, options: list[str]) -> None:
    """Measure in ``number`` processes, one after the other, and print the median over the rounds of all of them."""
    bare, ours = Times(), Times()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "times.json")
        for _ in range(number):
            subprocess.run([sys.executable, "-m", "benchmarks.overhead", *options, "--times", str(file)], check=True)
            for mine, seconds in zip((bare, ours), json.loads(file.read_text(encoding="utf-8")), strict=True):
                mine.wall += seconds["wall"]
                mine.cpu += seconds["cpu"]
    print(
        f"\nbare loop / trainer, median of {len(bare.wall)} rounds in {number} processes: "
        f"wall {ratio(bare.wall, ours.wall):.4f}, CPU {ratio(bare.cpu, ours.cpu):.4f}"
    )


def main() -> None:
    several = argparse.ArgumentParser(add_help=False)
    several.add_argument("--processes", type=int, default=1, help="number of processes, each with all rounds")
    launcher = argparse.ArgumentParser(add_help=False)
    launcher.add_argument("--nproc", type=int, default=1, help="number of ranks")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[launcher, several]
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--block", type=int, default=2, help="steps per block")
    parser.add_argument("--compile", action="store_true", help="compile the blocks and the loss of both")
    parser.add_argument("--tiny", action="store_true", help="shapes with which the host's own work dominates")
    parser.add_argument("--memory", action="store_true", help="measure bytes instead of time")
    parser.add_argument("--profile", type=int, metavar="LINES", help="profile the trainer's steps instead")
    parser.add_argument("--folder", help="run directory (default: a temporary one)")
    parser.add_argument("--times", help="file for the times of all rounds, as JSON")
    arguments = parser.parse_args()
    if arguments.processes > 1:
        in_processes(arguments.processes, several.parse_known_args()[1])
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or temporary
        if arguments.nproc == 1:
            run(arguments, folder)
            return
        _, options = launcher.parse_known_args()
        threads = str(max(1, (os.cpu_count() or 1) // arguments.nproc))
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.nproc}"]
        command = [*launch, "-m", "benchmarks.overhead", *options, "--folder", folder]
        ended = subprocess.run(command, env={"OMP_NUM_THREADS": threads, **os.environ}, check=False)
    raise SystemExit(ended.returncode)


def run(arguments: argparse.Namespace, folder: str) -> None:
    """Measure as one rank."""
    if arguments.memory:
        bare_bytes, our_bytes = peaks(LARGE_VOCABULARY, folder)
        print(
            f"\nbytes at the peak of a step: {bare_bytes / 2**20:.0f} MiB (bare loop), {our_bytes / 2**20:.0f} MiB (trainer)"
        )
        return
    settings = {**(TINY if arguments.tiny else SHAPES), "compile.enable": str(arguments.compile).lower()}
    with contenders(settings, WARM_UP + arguments.rounds * arguments.block, folder) as both:
        if arguments.profile:
            profile(both, arguments.profile)
            return
        bare, ours = measure(both, arguments.rounds, arguments.block)
        if both.trainer.world.rank == 0:
            report(both, bare, ours)
            if arguments.times:
                Path(arguments.times).write_text(json.dumps([vars(bare), vars(ours)]), encoding="utf-8")


if __name__ == "__main__":
    main()
