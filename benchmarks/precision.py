"""Compares precisions: tokens/s, MFU and loss of the same model on the same data.

All variants run in one process and take their steps in turns, so that other load on the machine affects all of them. Each
trains, so that the loss curves can be compared. They share the memory of the device: choose as many layers as fit (a layer
of the 8B model with its optimizer state takes about 3.5 GiB per variant).

    uv run python benchmarks/precision.py                            # a small model, emulated, on any machine
    uv run python benchmarks/precision.py --recipe llama3_8b --steps 40 --csv curves.csv \\
        --model.args.n_layers 3 --model.args.vocab_size 288 --model.tokenizer byte --model.tokenizer_path none \\
        --training.dataset stdlib --training.local_batch_size 1 --activation_checkpoint.mode selective    # on a GPU
"""

from __future__ import annotations

import argparse
import csv
import statistics
import tempfile
import time
from pathlib import Path

import torch

from titan_core.api import StepReport, World, hookimpl
from titan_core.api.config.resolved import Override
from titan_core.config.load import load_config
from titan_core.data.streams import OpenedData
from titan_core.job.assemble import assemble
from titan_core.loop.trainer import Trainer
from titan_core.loop.world import join_world
from titan_core.plugins.lifecycle import Lifecycle
from titan_core.plugins.registry import Components
from titan_core.runlog.run_directory import RunDirectory
from titan_core.toolkit.arguments import parse_overrides
from titan_core.toolkit.device import synchronize
from titan_debug.mfu import flops_by_type
from titan_debug.peak_flops import ideal_time_per_token

COMPILE = {"compile.enable": "true"}
FLOAT8 = {**COMPILE, "float8.enable": "true"}
VARIANTS: dict[str, dict[str, str]] = {
    "eager bf16": {},
    "compiled bf16": COMPILE,
    "compiled float8, tensorwise": FLOAT8,
    "compiled float8, rowwise": {**FLOAT8, "float8.recipe_name": "rowwise"},
    "compiled float8, rowwise_with_gw_hp": {**FLOAT8, "float8.recipe_name": "rowwise_with_gw_hp"},
    "compiled MXFP8": {**COMPILE, "mx.enable": "true"},
}
TOY = ["--model.args.n_layers", "2", "--training.seq_len", "128", "--training.global_batch_size", "4",
       "--training.local_batch_size", "4"]  # fmt: skip


class Variant:
    """A trainer in one precision, with its measurements."""

    def __init__(self, recipe: str, overrides: list[Override], settings: dict[str, str], folder: str) -> None:
        own = [Override(key, text) for key, text in {**settings, "job.dump_folder": folder}.items()]
        config, registry = load_config(recipe, [*overrides, *own], Components.from_installed())
        self.job = assemble(config, registry, 1)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def build(self, world: World) -> None:
        """Build weights, optimizer and data, and run two steps that compile."""
        self.job.require_hardware()
        lifecycle = Lifecycle([self])
        self.trainer = Trainer(
            self.job, world, OpenedData.of(self.job), lifecycle, RunDirectory.create(self.job.dump_folder)
        )
        lifecycle.train_start(self.trainer.run_start())
        for _ in range(2):
            self.step()
        self.seconds.clear()

    @hookimpl
    def titan_step_end(self, report: StepReport) -> None:
        """Record the loss."""
        self.losses.append(report.loss.item())

    def step(self) -> None:
        """Run one training step."""
        synchronize(self.trainer.world.device)
        started = time.perf_counter()
        self.trainer.step()
        synchronize(self.trainer.world.device)
        self.seconds.append(time.perf_counter() - started)

    def mfu(self) -> float:
        """Return the MFU, with each matmul relative to the peak of its own type."""
        job, world = self.job, self.trainer.world
        batch = job.batch
        dtype = getattr(torch, job.config.value("training.mixed_precision_param"))
        others = flops_by_type(self.trainer.state.parts, world)
        ideal = ideal_time_per_token(job.model.flops_per_token(batch.seq_len), dtype, others, world.device)
        return batch.tokens_per_step * ideal.seconds / statistics.median(self.seconds)


def table(variants: dict[str, Variant]) -> list[str]:
    """Return the results as a Markdown table."""
    baseline = statistics.median(variants["eager bf16"].seconds)
    lines = [
        "| variant | tokens/s | times eager bf16 | MFU | loss, mean of the last ten steps |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, variant in variants.items():
        median, last = statistics.median(variant.seconds), statistics.mean(variant.losses[-10:])
        speed = variant.job.batch.tokens_per_step / median
        lines.append(f"| {name} | {speed:,.0f} | {baseline / median:.2f} | {variant.mfu():.1%} | {last:.4f} |")
    return lines


def write_curves(path: Path, variants: dict[str, Variant]) -> None:
    """Write a CSV file with a row per step and a column per variant."""
    curves = zip(*(variant.losses for variant in variants.values()), strict=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *variants])
        writer.writerows([step, *losses] for step, losses in enumerate(curves, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", help="recipe to train (default: a small model, emulated)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), help="variants to compare with eager bf16")
    parser.add_argument("--emulate", action="store_true", help="emulate float8 and MXFP8 on any hardware")
    parser.add_argument("--csv", help="where to write the loss curves")
    arguments, rest = parser.parse_known_args()
    if arguments.recipe is None:
        arguments.recipe, arguments.emulate, rest = "llama3_debug", True, [*TOY, *rest]
    plain = [Override("training.mixed_precision_param", "bfloat16"), Override("training.steps", "100000")]
    plain += [Override("checkpoint.enable", "false")]
    overrides = [*plain, *parse_overrides(rest), Override("compile.enable", "false")]
    if arguments.emulate:
        overrides += [Override("float8.emulate", "true"), Override("mx.emulate", "true")]
    blackwell = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)
    chosen = [name for name in VARIANTS if "MXFP8" not in name or blackwell or arguments.emulate]
    if arguments.only is not None:
        chosen = ["eager bf16", *arguments.only]
    root = tempfile.mkdtemp()
    variants = {
        name: Variant(arguments.recipe, overrides, VARIANTS[name], f"{root}/{name}") for name in dict.fromkeys(chosen)
    }
    with join_world(variants["eager bf16"].job) as world:
        for variant in variants.values():
            variant.build(world)
        for number in range(arguments.steps):
            order = list(variants.values())
            for variant in order if number % 2 else reversed(order):
                variant.step()
        lines = table(variants)
        for variant in variants.values():
            variant.trainer.close()
    device = torch.cuda.get_device_name() if world.device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    import torchao

    emulated = "; float8 and MXFP8 emulated" if arguments.emulate else ""
    print(
        f"\ntorch {torch.__version__}, torchao {torchao.__version__}, {device}{emulated}; "
        f"medians of {arguments.steps} steps\n"
    )
    print("\n".join(lines))
    if arguments.csv:
        write_curves(Path(arguments.csv), variants)


if __name__ == "__main__":
    main()
