"""Predicted against published: ``titan estimate`` for the runs that TorchTitan's authors published.

    uv run python -m benchmarks.published [NAME ...]

Source: arXiv 2410.06511, tables 1 to 6 (pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md): H100 with 96 GB at
500 W. Their memory is what torch's allocator had reserved at most (``max_reserved_gib`` of TorchTitan's metrics) on the
rank that needed most, with expandable segments. Those runs kept the logits of all positions in fp32. A row takes half a
minute to minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

COMPILE = ("--compile.enable", "true")
EAGER = ("--compile.enable", "false")
FLOAT8 = (*COMPILE, "--float8.enable", "true")
ASYNC = (*FLOAT8, "--parallelism.enable_async_tensor_parallel", "true")


@dataclass(frozen=True)
class Row:
    """A published run."""

    name: str
    recipe: str
    ranks: int
    options: tuple[str, ...]
    tokens: float
    """Per second and GPU."""
    gib: float
    """Reserved by torch's allocator."""


def _long(recipe: str, length: int, cp: int, batch: int) -> tuple[str, ...]:
    return (
        *(ASYNC if "405b" in recipe else FLOAT8),
        "--training.seq_len", str(length), "--training.local_batch_size", str(batch),
        "--parallelism.context_parallel_degree", str(cp), "--activation_checkpoint.mode", "full",
        "--model.args.max_seq_len", str(max(131072, length)),
    )  # fmt: skip


SCHEDULE = "--parallelism.pipeline_parallel_schedule"
# That version of TorchTitan divided a batch into as many microbatches as the pipeline has ranks.
OF_FOUR = ("--parallelism.pipeline_parallel_microbatch_size", "4")
BATCH_70B = ("--training.local_batch_size", "16", "--training.global_batch_size", "512")
ROWS = (
    Row("8b-8-eager", "llama3_8b", 8, EAGER, 5762, 82.4),
    Row("8b-8-compile", "llama3_8b", 8, COMPILE, 6667, 77.0),
    Row("8b-8-float8", "llama3_8b", 8, FLOAT8, 8532, 76.8),
    Row("8b-cp1", "llama3_8b", 8, _long("llama3_8b", 32768, 1, 1), 3890, 83.9),
    Row("8b-cp2", "llama3_8b", 8, _long("llama3_8b", 65536, 2, 1), 2540, 84.2),
    Row("8b-cp4", "llama3_8b", 8, _long("llama3_8b", 131072, 4, 1), 1071, 84.0),
    Row("8b-cp8", "llama3_8b", 8, _long("llama3_8b", 262144, 8, 1), 548, 84.5),
    Row("8b-128-eager", "llama3_8b", 128, EAGER, 5605, 67.0),
    Row("8b-128-compile", "llama3_8b", 128, COMPILE, 6514, 62.0),
    Row("8b-128-float8", "llama3_8b", 128, FLOAT8, 8380, 61.8),
    Row("70b-float8", "llama3_70b", 256, (*FLOAT8, *BATCH_70B), 829, 71.9),
    Row("70b-async", "llama3_70b", 256, (*ASYNC, *BATCH_70B), 876, 67.6),
    Row("405b-1f1b", "llama3_405b", 512, (*ASYNC, *OF_FOUR, SCHEDULE, "1F1B"), 100, 82.5),
    Row("405b-interleaved", "llama3_405b", 512, (*ASYNC, *OF_FOUR, SCHEDULE, "Interleaved1F1B"), 128, 72.7),
    Row("405b-cp1", "llama3_405b", 512, (*_long("llama3_405b", 32768, 1, 8), SCHEDULE, "1F1B"), 76, 75.3),
    Row("405b-cp2", "llama3_405b", 512, (*_long("llama3_405b", 65536, 2, 8), SCHEDULE, "1F1B"), 47, 75.9),
    Row("405b-cp4", "llama3_405b", 512, (*_long("llama3_405b", 131072, 4, 8), SCHEDULE, "1F1B"), 31, 77.1),
    Row("405b-cp8", "llama3_405b", 512, (*_long("llama3_405b", 262144, 8, 8), SCHEDULE, "1F1B"), 16, 84.9),
)


def predict(row: Row) -> dict[str, float]:
    """Return the estimate of a row."""
    command = [
        sys.executable, "-m", "titan_core", "estimate", row.recipe, "--world-size", str(row.ranks), "--device", "h100-96gb",
        "--full-logits", "--json", *row.options,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{row.name}: {done.stderr.strip()[-500:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main(names: list[str]) -> None:
    """Print a line per row."""
    print(f"{'run':18} {'tokens/s':>9} {'published':>9} {'ratio':>6} {'GiB':>7} {'published':>9} {'ratio':>6}")
    for row in ROWS:
        if names and row.name not in names:
            continue
        found = predict(row)
        tokens, gib = found["tokens_per_second_per_gpu"], found["reserved_gib"]
        print(
            f"{row.name:18} {tokens:9,.0f} {row.tokens:9,.0f} {tokens / row.tokens:6.2f} "
            f"{gib:7.1f} {row.gib:9.1f} {gib / row.gib:6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
