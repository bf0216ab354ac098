"""Whether the best learning rate of a narrow model is that of wide ones: with muP it is, with the standard rules it is not.

Trains a small Llama at widths 64, 128, 256 and 512 with seven learning rates each, on the source of Python's standard
library, with muP and with the standard initial values and rates: 56 runs. Prints the loss of each, the mean over the last
tenth of its steps, and which rate is best; ``--results`` appends a line of JSON for each run, and skips those that the file
has already.

    uv run python -m benchmarks.mup --results mup.jsonl          # an hour or more on two cores
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_core.api import StepReport, hookimpl
from titan_core.api.config.resolved import Override
from titan_core.config.load import load_config
from titan_core.job.assemble import assemble
from titan_core.loop.training import train
from titan_core.plugins.registry import Components

BASE = {"dim": 64, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 192}
TIMES = (1, 2, 4, 8)
RATES = tuple(5e-4 * 2**power for power in range(7))
MUP, STANDARD = "muP", "standard"
SETTINGS: Mapping[str, object] = {
    "model.args.n_layers": 2,
    "training.seq_len": 64,
    "training.local_batch_size": 8,
    "training.global_batch_size": 8,
    "lr_scheduler.warmup_steps": 10,
    "lr_scheduler.decay_ratio": "none",
    "lr_scheduler.min_lr_factor": 0.0,
    "optimizer.weight_decay": 0.0,
    "metrics.enable_console": "false",
    "checkpoint.enable": "false",
    "sample.enable": "false",
    "training.on_nan": "ignore",
}


class Losses:
    """An observer that keeps the loss of each step."""

    def __init__(self) -> None:
        self.of_steps: list[float] = []

    @hookimpl
    def titan_step_end(self, report: StepReport) -> None:
        self.of_steps.append(report.loss.item())


def final_loss(kind: str, factor: int, rate: float, steps: int, seed: int, device: str) -> float:
    """Train one model, and return its mean loss over the last tenth of ``steps``."""
    installed = Components.from_installed()
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {**SETTINGS, "optimizer.lr": rate, "training.steps": steps, "training.seed": seed}
        settings |= {f"model.args.{name}": value * factor for name, value in BASE.items()}
        settings |= {"job.dump_folder": folder, "job.device": device}
        if kind == MUP:
            table = ", ".join(f"{name} = {value}" for name, value in BASE.items())
            settings |= {"optimizer.name": "MuAdamW", "mup.base": f"{{{table}}}"}
        overrides = [Override(key, str(value)) for key, value in settings.items()]
        config, registry = load_config("llama3_debug", overrides, installed)
        losses = Losses()
        train(assemble(config, registry, 1), [losses])
    last = losses.of_steps[-max(1, steps // 10) :]
    return sum(last) / len(last)


def table(results: Mapping[tuple[str, int, float], float], kind: str) -> list[str]:
    """Return the lines of a table: a row for each width, and a star at its best learning rate."""
    lines = [f"{kind:>9} | " + " ".join(f"{rate:>9.4g}" for rate in RATES)]
    for factor in TIMES:
        row = [results[kind, factor, rate] for rate in RATES]
        cells = (f"{loss:>8.4f}{'*' if loss == min(row) else ' '}" for loss in row)
        lines.append(f"{BASE['dim'] * factor:>9} | " + " ".join(cells))
    return lines


def best(results: Mapping[tuple[str, int, float], float], kind: str) -> list[int]:
    """Return the number of the best learning rate of each width."""
    rows = ([results[kind, factor, rate] for rate in RATES] for factor in TIMES)
    return [row.index(min(row)) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    results: dict[tuple[str, int, float], float] = {}
    same = {"steps": arguments.steps, "seed": arguments.seed}
    if arguments.results is not None and arguments.results.exists():
        for line in map(json.loads, arguments.results.read_text(encoding="utf-8").splitlines()):
            if same.items() <= line.items():
                results[line["kind"], line["times"], line["lr"]] = line["loss"]
    for factor in TIMES:
        for kind in (MUP, STANDARD):
            for rate in RATES:
                if (kind, factor, rate) in results:
                    continue
                loss = final_loss(kind, factor, rate, arguments.steps, arguments.seed, arguments.device)
                results[kind, factor, rate] = loss
                print(f"{kind} x {factor} lr {rate:.4g}: {loss:.4f}", flush=True)
                if arguments.results is not None:
                    with arguments.results.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({"kind": kind, "times": factor, "lr": rate, "loss": loss, **same}) + "\n")
    for kind in (MUP, STANDARD):
        print("\n".join(table(results, kind)))
        numbers = best(results, kind)
        transfers = all(abs(number - numbers[0]) <= 1 for number in numbers)
        verdict = "the best, or next to it," if transfers else "not the best, nor next to it,"
        print(f"{kind}: the best rate of width {BASE['dim']} is {verdict} at each width\n")


if __name__ == "__main__":
    main()
