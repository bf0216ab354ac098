"""Measures the time to the first step: `titan train`, compared with a script that has only torch and the model.

Both train one step of the same model on batches of the same shape, in processes of their own that alternate, so that other
load on the machine affects both. The time ends when the process prints that the step is complete. CPU time is that of all
threads.

    uv run python benchmarks/startup.py [--rounds 5] [--recipe llama3_debug] [--training.seq_len 256 ...]
    uv run python benchmarks/startup.py --imports     # modules that each imports, and the time of their own code
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass

STEP = "step 1/1"
BARE = "--bare"


@dataclass(frozen=True)
class Seconds:
    """Time of a process until its first step was complete."""

    wall: float
    cpu: float


def bare(local_batch: int, microbatches: int, seq_len: int, model_args: str) -> None:
    """Train one step as a script would: import torch and the model, and nothing else of Titan's."""
    import torch
    from torch.nn import functional as F

    from titan_models_llama.config import LlamaArgs
    from titan_models_llama.layout import layout
    from titan_models_llama.model import Llama

    args = LlamaArgs.model_validate_json(model_args)
    model = Llama(args)
    model.rope.copy_(layout(args).buffers["rope"]())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(microbatches):
        tokens = torch.randint(args.vocab_size, (local_batch, seq_len))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"{STEP}: loss {loss.item():.4f}", flush=True)


def until_first_step(command: list[str], folder: str) -> Seconds:
    """Return the time until ``command`` has completed its first step."""
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(STEP):
                wall = time.perf_counter() - started
                with open(f"/proc/{process.pid}/stat") as file:
                    fields = file.read().rpartition(") ")[2].split()
                cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                process.stdout.read()
                return Seconds(wall, cpu)
    raise SystemExit(f"{' '.join(command)} took no step")


def imports(commands: dict[str, list[str]], folder: str) -> None:
    """Print how many modules of each distribution each command imports, and the milliseconds of their own code."""
    modules: dict[str, dict[str, list[float]]] = defaultdict(lambda: {name: [] for name in commands})
    for name, (python, *arguments) in commands.items():
        command = [python, "-X", "importtime", *arguments]
        profile = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stderr
        for microseconds, module in re.findall(r"^import time: +(\d+) \| +\d+ \| +(\S+)", profile, re.MULTILINE):
            root = module.partition(".")[0]
            modules["standard library" if root in sys.stdlib_module_names else root][name].append(int(microseconds) / 1000)
    modules["all"] = {name: [one for found in modules.values() for one in found[name]] for name in commands}
    print(f"| modules, ms | {' | '.join(commands)} |\n| --- |{' ---: |' * len(commands)}")
    for root, found in sorted(modules.items(), key=lambda row: -max(map(sum, row[1].values()))):
        if max(map(sum, found.values())) >= 5:
            print(f"| {root} | {' | '.join(f'{len(times):,}, {sum(times):,.0f}' for times in found.values())} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recipe", default="llama3_debug")
    parser.add_argument("--imports", action="store_true", help="print the modules that each imports, not the time of a step")
    arguments, overrides = parser.parse_known_args()
    commands = {"bare script": [sys.executable, __file__, BARE, *shapes(arguments.recipe, overrides)]}
    ours = [sys.executable, "-m", "titan_core", "train", arguments.recipe, "--training.steps", "1", *overrides]
    commands["titan train"] = [*ours, "--checkpoint.enable", "false", "--sample.enable", "false"]
    taken: dict[str, list[Seconds]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.imports:
            imports(commands, folder)
            return
        for number in range(arguments.rounds + 1):
            for name, command in sorted(commands.items(), reverse=bool(number % 2)):
                seconds = until_first_step(command, folder)
                if number:  # the first round fills caches
                    taken[name].append(seconds)
    print("| first step | wall s | CPU s |\n| --- | --- | --- |")
    for name, times in taken.items():
        wall, cpu = (statistics.median(getattr(one, kind) for one in times) for kind in ("wall", "cpu"))
        print(f"| {name} | {wall:.2f} | {cpu:.2f} |")
    pairs = list(zip(taken["titan train"], taken["bare script"], strict=True))
    wall, cpu = (
        statistics.median(getattr(ours, kind) / getattr(theirs, kind) for ours, theirs in pairs) for kind in ("wall", "cpu")
    )
    print(f"| ratio (median) | {wall:.3f} | {cpu:.3f} |")


def shapes(recipe: str, overrides: list[str]) -> list[str]:
    """Return the arguments of :func:`bare` for the model and the batch of a recipe."""
    from titan_core.config.load import load_config
    from titan_core.job.assemble import assemble
    from titan_core.plugins.registry import Components
    from titan_core.toolkit.arguments import parse_overrides

    config, registry = load_config(recipe, parse_overrides(overrides), Components.from_installed())
    job = assemble(config, registry, 1)
    batch = job.batch
    return [*map(str, (batch.local_size, batch.microbatches, batch.seq_len)), job.model_args.model_dump_json()]


if __name__ == "__main__":
    if sys.argv[1:2] == [BARE]:
        bare(*map(int, sys.argv[2:5]), sys.argv[5])
    else:
        main()
