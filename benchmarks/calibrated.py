"""Calibrates this CPU, predicts the step time of jobs with `titan estimate`, measures them, and compares.

Calibration measures operators and messages on their own, so none of these jobs is known to it. Predictions and
measurements alternate. Each rank has one thread. The time of a job on one rank is the CPU time of the thread that trains,
which other load on the machine affects little; of a job on two ranks, which wait for each other, it is the wall time:
measure those on a quiet machine.

    uv run python benchmarks/calibrated.py
    uv run python benchmarks/calibrated.py --machine cpu.toml --only wide       # with an earlier calibration
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from titan_core.api import hookimpl
from titan_core.api.config.resolved import Override

WITHIN = 0.25
"""How far a prediction may be from the measured time."""
WARMUP = 3

OFF = {"checkpoint.enable": "false", "sample.enable": "false", "metrics.log_freq": "1000000", "job.device": "cpu"}


def model(dim: int, layers: int, ffn: int) -> str:
    """Return the arguments of a model with heads of width 64."""
    return f"{{dim = {dim}, n_layers = {layers}, n_heads = {dim // 64}, n_kv_heads = {max(1, dim // 128)}, ffn_dim = {ffn}}}"


def job(ranks: int, args: str, seq_len: int, batch: int, **more: str) -> tuple[int, dict[str, str]]:
    """Return the ranks of a job and its settings; ``batch`` is the global one."""
    settings = {
        "model.args": args, "training.seq_len": str(seq_len), "training.local_batch_size": str(batch),
        "training.global_batch_size": str(batch),
    }  # fmt: skip
    return ranks, settings | {key.replace("__", "."): value for key, value in more.items()}


FULL = {"activation_checkpoint__mode": "full"}
TP2 = {"parallelism__tensor_parallel_degree": "2"}
JOBS: dict[str, tuple[int, dict[str, str]]] = {
    "small": job(1, model(128, 6, 384), 128, 8),
    "long": job(1, model(256, 4, 768), 2048, 1),
    "wide": job(1, model(768, 4, 2048), 256, 4),
    "deep": job(1, model(256, 16, 768), 256, 4),
    "large batch": job(1, model(512, 4, 1536), 256, 32),
    "full recomputation": job(1, model(512, 6, 1536), 512, 4, **FULL),
    "FSDP 2": job(2, model(512, 6, 1536), 512, 4, training__local_batch_size="2"),
    "TP 2": job(2, model(512, 6, 1536), 512, 4, **TP2),
}


class StepTimes:
    """Records the CPU time and the wall time of each step."""

    def __init__(self) -> None:
        self.cpu: list[float] = []
        self.wall: list[float] = []

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        """Note when a step begins, which is when the one before ends."""
        self.cpu.append(time.thread_time())
        self.wall.append(time.perf_counter())

    def medians(self) -> tuple[float, float]:
        """Return the median CPU seconds and wall seconds of a step, without the first steps."""
        steps = [[after - before for before, after in pairwise(one)] for one in (self.cpu, self.wall)]
        cpu, wall = (statistics.median(one[WARMUP:]) for one in steps)
        return cpu, wall


def train(settings: dict[str, str], ranks: int) -> tuple[float, float]:
    """Train a job as one of its ranks; return the median CPU seconds and wall seconds of a step."""
    from titan_core.config.load import load_config
    from titan_core.job.assemble import assemble
    from titan_core.loop import training
    from titan_core.plugins.registry import Components

    times = StepTimes()
    overrides = [Override(key, value) for key, value in settings.items()]
    config, registry = load_config("llama3_debug", overrides, Components.from_installed())
    training.train(assemble(config, registry, ranks), [times])
    return times.medians()


def measure(name: str, steps: int) -> tuple[float, float]:
    """Return what :func:`train` returns on the first rank of a job."""
    from titan_simulate.calibrate.ranks import in_ranks

    ranks, settings = JOBS[name]
    with tempfile.TemporaryDirectory() as folder:
        settings = {**OFF, **settings, "training.steps": str(steps), "job.dump_folder": folder}
        return in_ranks(ranks, 1, train, settings, ranks)


def titan(*arguments: str) -> str:
    """Return the output of a command."""
    command = [sys.executable, "-m", "titan_core", *arguments]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return done.stdout


def predict(name: str, machine: Path) -> dict[str, Any]:
    """Return the estimate of a job on ``machine``."""
    ranks, settings = JOBS[name]
    overrides = [word for key, value in settings.items() for word in (f"--{key}", value)]
    text = titan("estimate", "llama3_debug", "--json", "--device", str(machine), "--world-size", str(ranks), *overrides)
    found: dict[str, Any] = json.loads(text)
    return found


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", type=Path, help="result of an earlier `titan calibrate` (default: calibrate now)")
    parser.add_argument("--only", action="append", choices=JOBS, help="run only this job")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        machine = options.machine
        if machine is None:
            machine = Path(folder) / "cpu.toml"
            print(titan("calibrate", "--device", "cpu", "--out", str(machine)))
        print("| job | ranks | predicted s | measured s | ratio | CPU s | wall s |\n|---|---|---|---|---|---|---|")
        missed = []
        for name in options.only or JOBS:
            ranks = JOBS[name][0]
            predicted = predict(name, machine)["step_seconds"]
            cpu, wall = measure(name, options.steps)
            measured = cpu if ranks == 1 else wall
            ratio = predicted / measured
            print(
                f"| {name} | {ranks} | {predicted:.4f} | {measured:.4f} | {ratio:.2f} | {cpu:.4f} | {wall:.4f} |", flush=True
            )
            if abs(ratio - 1) > WITHIN:
                missed.append(name)
    print(f"\nwithin {WITHIN:.0%}: {len(options.only or JOBS) - len(missed)} of {len(options.only or JOBS)}")
    if missed:
        raise SystemExit(f"not within {WITHIN:.0%}: {', '.join(missed)}")


if __name__ == "__main__":
    main()
