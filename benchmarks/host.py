"""Measures the host time of a step by part: on one device, and of one rank with each parallelism over 2 ranks.

Shapes are tiny, so a step's kernels take almost no time and the host's own work remains. Collectives are free: a fake
process group stands for the other ranks. Times are CPU times of the training thread. All variants train in one process, in
alternating blocks of steps, so that other load on the machine affects all of them; the ratios are medians over the rounds.
Each variant is compared with its base: the same model on one device, and a pipeline with the work of its first stage alone.

    uv run python benchmarks/host.py
    uv run python benchmarks/host.py --only "one device" --only "FSDP 2" --rounds 9
    uv run python benchmarks/host.py --profile "FSDP 2"          # cProfile of that variant's steps
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_core.api import JobMesh, ModelPart, StepInput, World
from titan_core.api.config.resolved import Override
from titan_core.api.parallel.model_part import arguments_of
from titan_core.api.training.batch import with_positions
from titan_core.config.load import load_config
from titan_core.data.streams import OpenedData
from titan_core.job.assemble import assemble
from titan_core.loop import trainer as trainer_module
from titan_core.loop.trainer import Trainer
from titan_core.model import build
from titan_core.plugins.lifecycle import Lifecycle
from titan_core.plugins.registry import Components
from titan_core.runlog.run_directory import RunDirectory
from titan_parallel import pipeline

T = TypeVar("T")

SHAPES = {
    "model.args": "{dim = 64, n_layers = 6, n_heads = 4, n_kv_heads = 2, ffn_dim = 128}",
    "training.seq_len": "32",
    "training.local_batch_size": "2",
    "training.global_batch_size": "2",
    "training.steps": "1000000",
    "metrics.log_freq": "1000000",
    "checkpoint.enable": "false",
    "sample.enable": "false",
}

FSDP = {"training.global_batch_size": "4"}
PIPELINE = {
    "parallelism.pipeline_parallel_degree": "2",
    "training.local_batch_size": "4",
    "training.global_batch_size": "4",
}
"""Four microbatches of one sequence."""
EXPERTS = {
    "model.args": "{dim = 64, n_layers = 6, n_heads = 4, n_kv_heads = 2, head_dim = 16, expert_dim = 128}",
    "experts.balance": "none",
}


@dataclass(frozen=True)
class Setup:
    """The job of a variant."""

    ranks: int = 1
    settings: dict[str, str] = field(default_factory=dict)
    recipe: str = "llama3_debug"
    base: str = "one device"
    """The variant that it is compared with."""
    alone: bool = False
    """Whether a plain loop runs the first stage of the pipeline."""


VARIANTS = {
    "one device": Setup(),
    "FSDP 2": Setup(2, FSDP),
    "FSDP 2, each block": Setup(2, {**FSDP, "parallelism.fsdp_group_mib": "0"}),
    "TP 2": Setup(2, {"parallelism.tensor_parallel_degree": "2"}),
    "TP 2, inputs kept": Setup(
        2,
        {"parallelism.tensor_parallel_degree": "2", "parallelism.tensor_parallel_reshard_after_forward": "never"},
    ),
    "CP 2": Setup(2, {"parallelism.context_parallel_degree": "2"}),
    "a stage alone": Setup(2, PIPELINE, base="a stage alone", alone=True),
    "PP 2, 1F1B": Setup(2, PIPELINE, base="a stage alone"),
    "experts": Setup(1, EXPERTS, "qwen3_moe_debug", "experts"),
    "experts, FSDP 2": Setup(2, {**EXPERTS, **FSDP}, "qwen3_moe_debug", "experts"),
    "EP 2": Setup(2, {**EXPERTS, **FSDP, "parallelism.expert_parallel_degree": "2"}, "qwen3_moe_debug", "experts"),
    "hf": Setup(
        1,
        {
            "model.name": "hf",
            "model.flavor": "",
            "model.args": '{architecture = "llama", config = {'
            "hidden_size = 64, num_hidden_layers = 6, num_attention_heads = 4, "
            "num_key_value_heads = 2, intermediate_size = 128, vocab_size = 288, rms_norm_eps = 1e-5}}",
        },
    ),
}

PARTS = ("data", "forward and backward", "norm and clipping", "optimizer", "bookkeeping")


class FirstOfEqualRanks(World):
    """The world of rank 0, in a process group that may have more ranks than the job."""

    def gather(self, value: T) -> list[T]:
        """Return ``value`` for every rank."""
        return [value] * self.size


def stage_alone(part: ModelPart) -> Callable[[StepInput], Tensor]:
    """Return the step that computes a pipeline's first stage, one microbatch after another, and sends nothing."""

    def step(inputs: StepInput) -> Tensor:
        batches = [one for batch in inputs.batches for one in with_positions(part.transformed(batch)).split(1)]
        for microbatch in replace(inputs, batches=batches).microbatches():
            with part.computing(microbatch) as batch:
                hidden = part.module(batch.tokens, **arguments_of(batch, part.layout))
            hidden.backward(torch.zeros_like(hidden))
        return torch.zeros(())

    return step


class Variant:
    """A trainer whose parts are timed. It takes its steps as rank 0 of its world."""

    def __init__(self, setup: Setup) -> None:
        overrides = {**SHAPES, **setup.settings, "job.dump_folder": tempfile.mkdtemp()}
        config, registry = load_config(
            setup.recipe, [Override(key, value) for key, value in overrides.items()], Components.from_installed()
        )
        job = assemble(config, registry, setup.ranks)
        device, plan = torch.device("cpu"), job.mesh
        world = FirstOfEqualRanks(0, device, plan, JobMesh(plan, device.type))
        lifecycle = Lifecycle([debugger.build.load()(debugger.context(job)) for debugger in job.observers])
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._timed = False
        self.trainer = Trainer(job, world, OpenedData.of(job), lifecycle, RunDirectory.create(job.dump_folder))
        lifecycle.train_start(self.trainer.run_start())
        self.trainer.requests.complete(world)
        self._instrument(setup)

    def _instrument(self, setup: Setup) -> None:
        trainer = self.trainer
        step = stage_alone(trainer.state.parts[0]) if setup.alone else trainer.run_step
        trainer.run_step = self._timer("forward and backward", step, evaluate=trainer.run_step.evaluate)
        for owner, part, names in (
            (trainer.loader, "data", ("peek", "next_step")),
            (trainer.state.optimizer, "optimizer", ("step", "zero_grad")),
        ):
            for name in names:
                setattr(owner, name, self._timer(part, getattr(owner, name)))

    def _timer(self, part: str, function: Callable[..., Any], **attributes: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*arguments, **keywords)
            finally:
                self._spent[part] += time.thread_time() - started

        call.__dict__.update(attributes)
        return call

    def block(self, steps: int) -> None:
        """Take ``steps`` steps and record the mean seconds of a step and of its parts."""
        self._spent.clear()
        of_norm = ("local_gradients", "global_norm", "clip_gradients")
        originals = {name: getattr(trainer_module, name) for name in of_norm}
        for name, function in originals.items():
            setattr(trainer_module, name, self._timer("norm and clipping", function))
        started = time.thread_time()
        try:
            for _ in range(steps):
                self.trainer.step()
        finally:
            for name, function in originals.items():
                setattr(trainer_module, name, function)
        total = time.thread_time() - started
        self._spent["bookkeeping"] = total - sum(self._spent.values())
        self.seconds["step"].append(total / steps)
        for part in PARTS:
            self.seconds[part].append(self._spent[part] / steps)

    def median(self, part: str) -> float:
        """Return the median of a part's seconds over the rounds."""
        return statistics.median(self.seconds[part])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--block", type=int, default=10, help="steps per block")
    parser.add_argument("--only", action="append", choices=list(VARIANTS), help="a variant to measure; may be repeated")
    parser.add_argument("--profile", choices=list(VARIANTS), help="print where the host time of this variant goes")
    arguments = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    # Gradients of collectives that do nothing are wrong, which the trial of a division would report.
    build.try_division = lambda *arguments: None
    # Nor can a stage learn its shapes from its neighbour, or receive numbers: its buffers must not have arbitrary ones.
    pipeline.current_simulation = lambda: cast(Any, "fake process group")
    empty = torch.empty_strided
    torch.empty_strided = lambda *arguments, **options: empty(*arguments, **options).zero_()
    names = [arguments.profile] if arguments.profile else arguments.only or list(VARIANTS)
    names = [name for name in VARIANTS if name in names or any(VARIANTS[other].base == name for other in names)]
    variants = {name: Variant(VARIANTS[name]) for name in names}
    for variant in variants.values():  # warm up
        variant.block(arguments.block)
        variant.seconds.clear()
    profiler = cProfile.Profile() if arguments.profile else None
    for number in range(arguments.rounds):
        order = list(variants.values())
        for variant in order if number % 2 else reversed(order):
            profiled = nullcontext() if profiler is None or variant is not variants[arguments.profile] else profiler
            with profiled:
                variant.block(arguments.block)
    if profiler is not None:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
    print_table(variants)
    for variant in variants.values():
        variant.trainer.close()
    dist.destroy_process_group()


def print_table(variants: dict[str, Variant]) -> None:
    """Print milliseconds by part, and the ratio of each variant to its base."""
    print(f"\ntorch {torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} CPUs; milliseconds of a step\n")
    print("| part | " + " | ".join(variants) + " |")
    print("| --- |" + " ---: |" * len(variants))
    for part in (*PARTS, "step"):
        print(f"| {part} | " + " | ".join(f"{1e3 * variant.median(part):.2f}" for variant in variants.values()) + " |")
    bases = {name: variants[VARIANTS[name].base].seconds["step"] for name in variants}
    ratios = [
        statistics.median(mine / base for mine, base in zip(variant.seconds["step"], bases[name], strict=True))
        for name, variant in variants.items()
    ]
    print("| compared with | " + " | ".join(VARIANTS[name].base for name in variants) + " |")
    print("| step | " + " | ".join(f"{ratio:.2f} x" for ratio in ratios) + " |")


if __name__ == "__main__":
    main()
