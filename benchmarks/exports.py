"""Measures what exporting each checkpoint costs the steps that follow it (`checkpoint.export = "hf"`).

One process trains in turns without exports, without them beside a loop of the same priority, and with exports, always with
checkpoints. It compares the steps after a save. The export runs longer than they take, which the benchmark requires. The
loop uses no memory: what it costs is the machine's, as where two threads share a core.

    OMP_NUM_THREADS=1 uv run python -m benchmarks.exports
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import titan_core
from titan_core.api import StepReport

AFTER = 25
"""Steps after each save that count."""


def has_children() -> bool:
    """Whether this process has children: it starts exports only."""
    return any(path.read_text() for path in Path("/proc/self/task").glob("*/children"))


def steps_after_saves(folder: Path, export: bool, arguments: argparse.Namespace) -> list[float]:
    """Train, and return the seconds of each of the steps after a save."""
    ended: dict[int, float] = {}
    exports_seen = 0

    def on_step(report: StepReport) -> None:
        nonlocal exports_seen
        ended[report.step] = time.perf_counter()
        exports_seen += report.step % arguments.interval == AFTER and has_children()

    settings = {
        "model.args": {"dim": arguments.width, "n_layers": 4, "ffn_dim": 3 * arguments.width},
        "training.seq_len": 64,
        "training.local_batch_size": 2,
        "training.global_batch_size": 2,
        "training.steps": arguments.interval * (arguments.saves + 1),
        "checkpoint.enable": True,
        "checkpoint.interval": arguments.interval,
        "checkpoint.async_mode": "async",
        "checkpoint.last_save_model_only": True,
        "job.device": "cpu",
        "job.dump_folder": str(folder),
        **({"checkpoint.export": "hf"} if export else {}),
    }
    titan_core.train("llama3_debug", settings, on_step=on_step)
    if export and exports_seen < arguments.saves:
        raise SystemExit(f"only {exports_seen} of {arguments.saves} exports still ran {AFTER} steps after their saves")
    saved = range(arguments.interval, arguments.interval * (arguments.saves + 1), arguments.interval)
    return [ended[step + after] - ended[step + after - 1] for step in saved for after in range(2, AFTER + 1)]


@contextlib.contextmanager
def loop() -> Iterator[None]:
    """Run a loop of the lowest priority beside this process."""
    process = subprocess.Popen(["nice", "-n", "19", sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--saves", type=int, default=3, help="saves of a round whose next steps count")
    parser.add_argument("--interval", type=int, default=60, help="steps between saves")
    parser.add_argument("--width", type=int, default=256, help="width of the model's hidden states")
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {"without exports": [], "beside a loop": [], "with exports": []}
    with tempfile.TemporaryDirectory() as root:
        for number in range(arguments.rounds):
            for kind, steps in times.items():
                folder = Path(root, f"{number}-{kind}")
                with loop() if kind == "beside a loop" else contextlib.nullcontext():
                    steps += steps_after_saves(folder, kind == "with exports", arguments)
    print(f"\ntorch {torch.__version__}, {os.cpu_count()} cores; steps 2 to {AFTER} after each of {arguments.saves} saves, "
          f"{arguments.rounds} rounds\n")  # fmt: skip
    first = statistics.median(times["without exports"])
    for kind, steps in times.items():
        print(f"{kind:16} {statistics.median(steps) * 1000:6.1f} ms a step, {statistics.median(steps) / first:.3f}")


if __name__ == "__main__":
    main()
