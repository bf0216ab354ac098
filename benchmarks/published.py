"""Predicted against published: ``titan estimate`` for runs that TorchTitan's authors and others published.

    uv run python -m benchmarks.published [NAME ...]
    uv run python -m benchmarks.published NAME --json      # the whole estimate of a row

Source: arXiv 2410.06511, tables 1 to 6 (pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md): H100 with 96 GB at
500 W. Their memory is what torch's allocator had reserved at most (``max_reserved_gib`` of TorchTitan's metrics) on the
rank that needed most, with expandable segments. A row takes half a minute to minutes. Rows of models with experts come
last; their sources stand beside them.

TorchTitan's runs are estimated with what they had in place of Titan's own: a loss that holds the logits of all positions in
fp32 and is not compiled (:mod:`benchmarks.published_loss`), their ring attention (:mod:`benchmarks.published_ring`), and
FlashAttention 2.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_core.api import Phase, Ref, Transform
from titan_core.api.config.resolved import Override
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.config.load import load_config
from titan_core.job.assemble import assemble
from titan_core.plugins.registry import Components
from titan_simulate.engine import stub_libraries
from titan_simulate.hardware.machine import Machine
from titan_simulate.hardware.read import read_machine

if TYPE_CHECKING:
    from titan_simulate.estimate.estimate import Estimate

ROOT = Path(__file__).parents[1]

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
    gib: float | None
    """Reserved by torch's allocator, if published."""
    machine: str = "h100-96gb"
    torchtitan: bool = True
    """Whether TorchTitan trained: with logits of all tokens, and FlashAttention 2 where Titan prefers cuDNN's kernel."""


def _long(recipe: str, length: int, cp: int, batch: int) -> tuple[str, ...]:
    return (
        *(ASYNC if "405b" in recipe else FLOAT8),
        "--training.seq_len", str(length), "--training.local_batch_size", str(batch),
        "--parallelism.context_parallel_degree", str(cp), "--activation_checkpoint.mode", "full",
        "--model.args.max_seq_len", str(max(131072, length)),
    )  # fmt: skip


LOCAL, GLOBAL = "--training.local_batch_size", "--training.global_batch_size"
SCHEDULE = "--parallelism.pipeline_parallel_schedule"
# That version of TorchTitan divided a batch into as many microbatches as the pipeline has ranks.
MICROBATCH = "--parallelism.pipeline_parallel_microbatch_size"
OF_FOUR = (MICROBATCH, "4")
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


EP8 = ("--parallelism.expert_parallel_degree", "8")
LENGTH = ("--training.seq_len", "4096")
OF_30B = (*EP8, *COMPILE, *LENGTH, "--activation_checkpoint.mode", "full")
OF_235B = (*COMPILE, *LENGTH, GLOBAL, "2048", "--parallelism.tensor_parallel_degree", "2")
PIPELINED = (
    *OF_235B, LOCAL, "128", MICROBATCH, "1", SCHEDULE, "Interleaved1F1B", "--activation_checkpoint.mode", "selective",
)  # fmt: skip


def _of_step(seconds: float) -> float:
    """Return the tokens per second and GPU of Megatron's runs from the duration of a step."""
    return 2048 * 4096 / seconds / 256


# Experts, with an even choice, as in the published runs.
# qwen3-30b-*: torchtitan/distributed/deepep/README.md and qwen3_30b_a3b_with_deepep.toml of pytorch/torchtitan at
#   022f885f: with its own all-to-all and with DeepEP.
# nemo-30b: docs/performance-summary.md and qwen3_moe_30b_te_deepep.yaml of NVIDIA-NeMo/Automodel at 01926a5c: DeepEP,
#   kernels of Transformer Engine.
# megatron-235b-*: best_practice/Qwen3/readme.md of yanring/Megatron-MoE-ModelZoo at c1ad0b5c: DeepEP. The pipeline
#   recomputes norms and activation functions, which is less than Titan's selective mode.
ROWS_OF_EXPERTS = (
    Row("qwen3-30b-alltoall", "qwen3_30b_a3b", 8, (*OF_30B, LOCAL, "8"), 9930, None, "b200"),
    Row("qwen3-30b-deepep", "qwen3_30b_a3b", 8, (*OF_30B, LOCAL, "8"), 14796, 167.9, "b200"),
    Row("nemo-30b", "qwen3_30b_a3b", 8, (*OF_30B, LOCAL, "4", GLOBAL, "512"), 12040, None, "h100", False),
    Row("megatron-235b-fsdp", "qwen3_235b_a22b", 256, (*OF_235B, *EP8, LOCAL, "4"), _of_step(17.6), None, "h100", False),
    Row(
        "megatron-235b-pp8", "qwen3_235b_a22b", 256,
        (*PIPELINED, "--parallelism.expert_parallel_degree", "32", "--parallelism.pipeline_parallel_degree", "8"),
        _of_step(19.7), None, "h100", False,
    ),
)  # fmt: skip


UNCOMPILED_LOSS = {"objective.chunk_tokens": str(2**40), "compile.components": '["model"]'}
"""Settings of the loss of those runs: one chunk, eager."""


def as_published(job: AssembledJob) -> AssembledJob:
    """Return ``job`` with the loss of the published runs, and their ring attention in place of Titan's, if it has one."""
    ring = Transform(
        name="published_ring",
        summary="the ring attention of TorchTitan's published runs",
        phase=Phase.DATA,
        apply=Ref("benchmarks.published_ring:stand_in_for_rings"),
        active=lambda context: True,
    )
    objective = replace(job.objective, build=Ref("benchmarks.published_loss:full_logits"))
    return replace(job, objective=objective, transforms=(*job.transforms, ring))


def with_flash_attention(machine: Machine) -> Machine:
    """Return ``machine`` with FlashAttention 2 in place of the kernel that Titan prefers."""
    if machine.attention.flash is None:
        return machine
    changes = {**machine.attention.flash.model_dump(), "kernel": "flash", "flash": None}
    return machine.model_copy(update={"attention": machine.attention.model_copy(update=changes)})


def estimated(row: Row) -> Estimate:
    """Return the estimate of a row, in this process, which must not have imported torch."""
    stub_libraries.load()
    from titan_core.loop.training import train
    from titan_simulate.estimate.estimate import estimate

    own = [Override(key.removeprefix("--"), value) for key, value in zip(row.options[::2], row.options[1::2], strict=True)]
    if row.torchtitan:
        own += [Override(key, value) for key, value in UNCOMPILED_LOSS.items()]

    def job_of(more: Sequence[Override]) -> AssembledJob:
        config, registry = load_config(row.recipe, [*own, *more], Components.from_installed())
        return assemble(config, registry, row.ranks, missing_ok=True)

    machine = read_machine(row.machine)
    if not row.torchtitan:
        return estimate(job_of, train, machine)
    return estimate(job_of, train, with_flash_attention(machine), change=as_published)


def predict(row: Row) -> dict[str, Any]:
    """Return the estimate of a row, made in a new process, as plain values."""
    command = [sys.executable, "-m", "benchmarks.published", row.name, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{row.name}: {done.stderr.strip()[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Print a line per row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="rows (default: all)")
    parser.add_argument("--json", action="store_true", help="print the whole estimate of one row, as JSON")
    options = parser.parse_args()
    rows = [row for row in (*ROWS, *ROWS_OF_EXPERTS) if not options.names or row.name in options.names]
    if options.json:
        print(json.dumps(asdict(estimated(rows[0]))))
        return
    print(f"{'run':18} {'tokens/s':>9} {'published':>9} {'ratio':>6} {'GiB':>7} {'published':>9} {'ratio':>6}")
    for row in rows:
        found = predict(row)
        tokens, gib = found["tokens_per_second_per_gpu"], found["reserved_gib"]
        memory = f"{gib:7.1f}" + ("" if row.gib is None else f" {row.gib:9.1f} {gib / row.gib:6.2f}")
        print(f"{row.name:18} {tokens:9,.0f} {row.tokens:9,.0f} {tokens / row.tokens:6.2f} {memory}", flush=True)


if __name__ == "__main__":
    main()
