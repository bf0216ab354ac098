"""Prints the bytes that a block of Llama 3.1 70B keeps for backward, per token, for each mode of recomputation, beside the
formula of Korthikanti et al. (arXiv 2205.05198, table 2) without the scores of attention, which fused kernels do not keep:
34 h / t for hidden states of width h on t ranks of tensor and sequence parallelism, and 2 h / t if blocks are recomputed.

A rank of a job with few blocks is simulated, then one with more: what more of them leave for backward is what the
additional blocks keep. No GPU is needed.

    uv run python benchmarks/activation_bytes.py [--tensor-parallel 8]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence

FEW, MORE = 3, 5
TOKENS = 8192
WIDTH = 8192
MODES = {
    "none, and inputs of regions kept": ("none", "--parallelism.tensor_parallel_reshard_after_forward", "never"),
    "none": ("none",),
    "selective": ("selective",),
    "full": ("full",),
}


def kept(blocks: int, degree: int, mode: Sequence[str]) -> int:
    """Return the bytes that the forward pass of one sequence in bf16 leaves for backward."""
    settings = {
        "compile.enable": "false",
        "model.args.n_layers": blocks,
        "training.seq_len": TOKENS,
        "training.local_batch_size": 1,
        "training.global_batch_size": 1,
        "training.mixed_precision_param": "bfloat16",
        "parallelism.tensor_parallel_degree": degree,
    }
    options = [option for key, value in settings.items() for option in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "titan_core", "simulate", "llama3_70b", "--world-size", str(degree), "--json", *options]
    command += ["--steps", "1", "--activation_checkpoint.mode", *mode]
    memory = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)["allocations"]
    begins = {phase: position for position, phase in reversed(memory["moments"])}
    # An allocation has its bytes, and its end none.
    alive: dict[int, int] = {number: size for number, size, _ in memory["events"][begins["forward"] : begins["backward"]]}
    return sum(alive.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor-parallel", type=int, default=8)
    degree = parser.parse_args().tensor_parallel
    print("| recomputation | bytes per token and block | the formula | ratio |\n| --- | ---: | ---: | ---: |")
    for name, mode in MODES.items():
        found = (kept(MORE, degree, mode) - kept(FEW, degree, mode)) / ((MORE - FEW) * TOKENS)
        formula = {"none": 34, "full": 2}.get(mode[0])
        theirs = "| |" if formula is None else f"{formula * WIDTH / degree:,.0f} | {found * degree / formula / WIDTH:.2f} |"
        print(f"| {name} | {found:,.0f} | {theirs}", flush=True)


if __name__ == "__main__":
    main()
