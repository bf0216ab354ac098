"""What compilation and each way of recomputation cost and save: time of a step, and memory kept for backward.

All variants are built in one process and take their steps in turns, so that what else the machine does hits all of them.
Memory is what the process (on a GPU: the device) holds more after a forward pass than before it, of one microbatch.

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

from titan_core.api.batch import Batch
from titan_core.api.config import Override
from titan_core.api.microbatch import Microbatch
from titan_core.api.optimizer import param_groups, trained_parameters
from titan_core.api.sections import OptimizerSection
from titan_core.api.tools.arguments import parse_overrides
from titan_core.config.load import load_config
from titan_core.job.assemble import assemble
from titan_core.model.build import build_parts
from titan_core.plugins.registry import Registry
from titan_core.train.world import join_world

M_MMAP_THRESHOLD = -3
"""glibc's name for the size from which memory goes back to the system as soon as it is freed."""

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
"""What needs a process of its own (``--only``): the compiler serves equal blocks with the graph of the first, and with its
choice of what to keep."""


class Variant:
    """A model, its optimizer and one batch."""

    def __init__(self, recipe: str, overrides: list[Override], settings: dict[str, str]) -> None:
        own = [Override(key, text) for key, text in settings.items()]
        config, registry = load_config(recipe, [*overrides, *own], Registry.from_installed())
        job = assemble(config, registry, 1)
        self.seconds: list[float] = []
        with join_world(job) as world:
            self.device = world.device
            (self.part,) = build_parts(job, world.mesh, world.device)
            groups = param_groups(trained_parameters([self.part]), config.section(OptimizerSection))
            context = job.optimizer.optimizer_context(job.facts, world.mesh, world.device, groups)
            self.optimizer = job.optimizer.build.load()(context)
            batch = job.facts.batch
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
        """One forward, backward and update."""
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
        """Bytes in use."""
        self.synchronize()
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def table(variants: dict[str, Variant]) -> list[str]:
    """As Markdown."""
    baseline = statistics.median(variants["eager"].seconds)
    lines = ["| variant | tokens/s | times eager | kept for backward, MiB |", "| --- | --- | --- | --- |"]
    for name, one in variants.items():
        median = statistics.median(one.seconds)
        lines.append(f"| {name} | {one.tokens / median:,.0f} | {baseline / median:.2f} | {one.kept / 2**20:,.1f} |")
    return lines


def in_turns(steps: list[Callable[[], None]], rounds: int) -> None:
    """Each step once a round, the order turned round every time."""
    for number in range(rounds):
        for step in steps if number % 2 else reversed(steps):
            step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="llama3_debug")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="*", choices=[*VARIANTS, *ALONE], help="besides eager")
    arguments, rest = parser.parse_known_args()
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
    overrides = parse_overrides(rest if rest or arguments.recipe != "llama3_debug" else DEFAULTS)
    # What the recipe itself sets is the variants' to decide.
    plain = [Override(MODE, "none"), Override(COMPILE, "false")]
    chosen = (
        VARIANTS if arguments.only is None else {"eager": {}} | {name: (VARIANTS | ALONE)[name] for name in arguments.only}
    )
    variants = {name: Variant(arguments.recipe, [*overrides, *plain], settings) for name, settings in chosen.items()}
    in_turns([one.step for one in variants.values()], arguments.rounds)
    device = variants["eager"].device
    what = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"\ntorch {torch.__version__}, {what}; medians of {arguments.rounds} steps in turns\n")
    print("\n".join(table(variants)))


if __name__ == "__main__":
    main()
