"""Measures what a restart costs: a rank of a job of several processes is killed, and the launcher starts all ranks again.

The time runs from SIGKILL to the next completed step. It is compared with `import torch` plus a fresh start, which is the
time from the start of `titan train` to its first step. The parts are those of the line that a restarted job prints.

    uv run python -m benchmarks.recovery [--ranks 2 4] [--rounds 3] [--compile.enable true ...]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PARTS = ("detect", "stop", "rendezvous", "import", "join", "build", "restore", "first step")
LAST = 8
"""The step after which a rank is killed."""
SETTINGS = [
    "--model.args", "{dim = 64, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 128}", "--training.seq_len", "64",
    "--training.local_batch_size", "1", "--training.global_batch_size", "8", "--training.steps", "1000000",
    "--metrics.log_freq", "1", "--job.device", "cpu", "--checkpoint.enable", "true", "--checkpoint.interval", "5",
    "--sample.enable", "false",
]  # fmt: skip
PATIENCE = 600.0


class Job:
    """A running job."""

    def __init__(self, folder: Path, ranks: int, overrides: list[str]) -> None:
        command = [sys.executable, "-m", "titan_core", "train", "llama3_debug", "--nproc-per-node", str(ranks)]
        command += ["--max-restarts", "3", *SETTINGS, "--job.dump_folder", str(folder / "run"), *overrides]
        self._run, self._log = folder / "run", folder / "log.txt"
        self.began = time.time()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the complete lines of a file of the run."""
        try:
            text = (self._run / name).read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait_for(self, find: Callable[[], Any]) -> Any:
        """Return the first true result of ``find``."""
        end = time.monotonic() + PATIENCE
        while not (found := find()):
            if self._process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the job ended, or does not continue:\n{self._log.read_text()}")
            time.sleep(0.02)
        return found

    def steps_after(self, moment: float) -> list[dict[str, Any]]:
        """Return the records of the steps that were completed after ``moment``."""
        return [record for record in self.lines("metrics.jsonl") if record["time"] > moment]

    def processes(self) -> list[int]:
        """Return the process ids of the ranks of the last attempt."""
        starts = [event for event in self.lines("events.jsonl") if event["event"] == "start"]
        return [one["pid"] for one in starts[-1]["processes"]]

    def end(self) -> None:
        """End the job, and wait for its launcher."""
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
            if self._process.poll() is None:
                self._process.send_signal(number)
                try:
                    self._process.wait(30)
                except subprocess.TimeoutExpired:
                    continue
        self._process.wait()


def recovery(ranks: int, overrides: list[str]) -> dict[str, float]:
    """Return the seconds of a fresh start, of its first step, of a recovery (``total``) and of its parts, and the number of
    steps that were trained again."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), ranks, overrides)
        try:
            first = job.wait_for(lambda: job.steps_after(0))[0]
            job.wait_for(lambda: job.steps_after(0)[-1]["step"] >= LAST)
            began = next(event["time"] for event in job.lines("events.jsonl") if event["event"] == "start")
            old, killed = job.processes(), time.time()
            os.kill(old[1], signal.SIGKILL)
            job.wait_for(lambda: job.processes() != old)
            found = job.wait_for(lambda: [one for one in job.lines("events.jsonl") if one.get("kind") == "recovery"])
            step = job.wait_for(lambda: [one for one in job.steps_after(killed) if one["step"] >= found[0]["step"]])[0]
        finally:
            job.end()
    message = found[0]["message"]
    parts = {name.strip(): float(seconds) for name, seconds in re.findall(r"([a-z ]+?) ([\d.]+)(?=[,;])", message)}
    again = int(re.search(r"(\d+) steps? trained again", message)[1])  # type: ignore[index]
    fresh, total = first["time"] - job.began, step["time"] - killed
    steps = {"fresh step": first["time"] - began, "again": again}
    return {**{name: parts[name] for name in PARTS}, "total": total, "fresh": fresh, **steps}


def import_torch() -> float:
    """Return the seconds that a new process needs to import torch."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    arguments, overrides = parser.parse_known_args()
    columns = [
        *PARTS,
        "from SIGKILL to the next step",
        "import torch",
        "fresh start",
        "its first step",
        "ratio",
        "steps again",
    ]
    print(f"| ranks | {' | '.join(columns)} |\n|{' --- |' * (len(columns) + 1)}")
    for ranks in arguments.ranks:
        rounds = []
        for _ in range(arguments.rounds):
            imported = import_torch()
            rounds.append({**recovery(ranks, overrides), "import torch": imported})
        for one in rounds:
            one["ratio"] = one["total"] / (one["import torch"] + one["fresh"])
        shown = [*PARTS, "total", "import torch", "fresh", "fresh step", "ratio", "again"]
        medians = {name: statistics.median(one[name] for one in rounds) for name in shown}
        cells = [f"{medians[name]:.2f}" if name == "ratio" else f"{medians[name]:.1f}" for name in shown[:-1]]
        print(f"| {ranks} | {' | '.join(cells)} | {medians['again']:g} |", flush=True)


if __name__ == "__main__":
    main()
