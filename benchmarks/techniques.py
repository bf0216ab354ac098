"""Compares compilation and recomputation modes: time of a step, and memory saved for backward.

All variants run in one process and take their steps in turns, so that other load on the machine affects all of them. Memory
is the growth of the process (on a GPU: of allocated device memory) over the forward pass of one microbatch.

    uv run python benchmarks/techniques.py
    uv run python benchmarks/techniques.py --only "compiled, budget 0.5"
    uv run python benchmarks/techniques.py --recipe llama3_8b --rounds 5 --model.args.n_layers 8 \\
        --model.tokenizer byte --model.tokenizer_path none --training.dataset stdlib     # on a GPU
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import time
from collections.abc import Callable

import torch

from titan_core.api import Batch, Microbatch, OptimizerSection
from titan_core.api.config.resolved import Override
from titan_core.api.training.optimizer import param_groups, trained_parameters
from titan_core.config.load import load_config
from titan_core.job.assemble import assemble
from titan_core.loop.world import join_world
from titan_core.model.build import build_parts
from titan_core.plugins.registry import Components
from titan_core.toolkit.arguments import parse_overrides

M_MMAP_THRESHOLD = -3
"""glibc's parameter for the size from which freed memory returns to the system at once."""

DEFAULTS = [
    "--model.args.dim",
    "512",
    "--model.args.n_layers",
    "4",
    "--model.args.ffn_dim",
    "1536",
    "--training.seq_len",
    "512",
]

MODE, OPTION, COMPILE = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option", "compile.enable"
VARIANTS: dict[str, dict[str, str]] = {
    "eager": {},
    "eager, every 2nd block": {MODE: "selective", OPTION: "2"},
    "eager, selective": {MODE: "selective"},
    "eager, full": {MODE: "full"},
    "compiled": {COMPILE: "true"},
    "compiled, selective": {COMPILE: "true", MODE: "selective"},
    "compiled, full": {COMPILE: "true", MODE: "full"},
}
ALONE: dict[str, dict[str, str]] = {"compiled, budget 0.5": {COMPILE: "true", MODE: "memory_budget"}}
"""Variants that need a separate process (``--only``): the compiler reuses the graph of the first of several equal blocks,
including its choice of saved tensors."""


class Variant:
    """A model, its optimizer and one batch."""

    def __init__(self, recipe: str, overrides: list[Override], settings: dict[str, str]) -> None:
        own = [Override(key, text) for key, text in settings.items()]
        config, registry = load_config(recipe, [*overrides, *own], Components.from_installed())
        job = assemble(config, registry, 1)
        self.seconds: list[float] = []
        with join_world(job) as world:
            self.device = world.device
            (self.part,) = build_parts(job, world.mesh, world.device)
            groups = param_groups(trained_parameters([self.part]), config.section(OptimizerSection))
            context = job.optimizer.optimizer_context(job, world.mesh, world.device, groups)
            self.optimizer = job.optimizer.build.load()(context)
            batch = job.batch
            shape = (batch.local_size, batch.seq_len)
            tokens = torch.randint(job.text_tokenizer.vocab_size, shape, device=world.device)
            self.batch, self.tokens = Microbatch(Batch(tokens, tokens), step=1, seed=0), tokens.numel()
            for _ in range(2):  # compiles
                self.step()
            before = self.held()
            loss = self.part.forward_loss(self.batch)
            self.kept = self.held() - before
            del loss
        self.seconds.clear()

    def step(self) -> None:
        """Run one forward, backward and update."""
        self.synchronize()
        started = time.perf_counter()
        (self.part.forward_loss(self.batch) / self.tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.synchronize()
        self.seconds.append(time.perf_counter() - started)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def held(self) -> int:
        """Return the memory in use, in bytes."""
        self.synchronize()
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def table(variants: dict[str, Variant]) -> list[str]:
    """Return the results as a Markdown table."""
    baseline = statistics.median(variants["eager"].seconds)
    lines = ["| variant | tokens/s | times eager | saved for backward, MiB |", "| --- | --- | --- | --- |"]
    for name, variant in variants.items():
        median = statistics.median(variant.seconds)
        speed, saved = variant.tokens / median, variant.kept / 2**20
        lines.append(f"| {name} | {speed:,.0f} | {baseline / median:.2f} | {saved:,.1f} |")
    return lines


def in_turns(steps: list[Callable[[], None]], rounds: int) -> None:
    """Run each step once per round, in alternating order."""
    for number in range(rounds):
        for step in steps if number % 2 else reversed(steps):
            step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="llama3_debug")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="*", choices=[*VARIANTS, *ALONE], help="variants to compare with eager")
    arguments, rest = parser.parse_known_args()
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
    overrides = parse_overrides(rest if rest or arguments.recipe != "llama3_debug" else DEFAULTS)
    # The variants override the recipe's own choice of these.
    plain = [Override(MODE, "none"), Override(COMPILE, "false")]
    chosen = (
        VARIANTS if arguments.only is None else {"eager": {}} | {name: (VARIANTS | ALONE)[name] for name in arguments.only}
    )
    variants = {name: Variant(arguments.recipe, [*overrides, *plain], settings) for name, settings in chosen.items()}
    in_turns([variant.step for variant in variants.values()], arguments.rounds)
    cuda = variants["eager"].device.type == "cuda"
    device = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    print(f"\ntorch {torch.__version__}, {device}; medians of {arguments.rounds} steps in turns\n")
    print("\n".join(table(variants)))


if __name__ == "__main__":
    main()
