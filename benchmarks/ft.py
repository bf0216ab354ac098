"""Kills a replica group again and again (SIGKILL), and measures what the other one notices.

Two groups of one process each train one model through a lighthouse of this benchmark's own. Each kill strikes when both have
taken part for some steps; the group restarts once the survivor has taken steps alone, and copies its state. Both groups
record the time and a hash of all weights after each step. The command exits with an error if the survivor's steps ever stop
for longer than its timeouts allow, if its step numbers have a gap, or if the weights of the groups differ after any step
that both took.

    uv run python -m benchmarks.ft [--kills 5] [--recipe llama3_debug] [--training.seq_len 64 ...]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from titan_core.api import hookimpl

TIMEOUT_MS = 10_000
HEARTBEAT_MS = 2_000
ALONE, TOGETHER = 5, 5
"""Steps that the survivor takes alone before the other group restarts, and both together before the next kill."""
PATIENCE = 300.0
"""Seconds after which something that never happens ends the benchmark."""


@dataclass(frozen=True)
class Step:
    """A step of one group."""

    number: int
    time: float
    weights: str


@dataclass(frozen=True)
class Kill:
    """What one kill cost."""

    at_step: int
    longest_gap: float
    """Seconds between two steps of the survivor, at most, from the kill until both groups were together again."""
    usual: float
    """Seconds of a step before the kill (median)."""
    alone: int
    """Steps that the survivor took alone."""
    back: float
    """Seconds from the restart to the first step together."""
    compared: int
    """Steps together after the return whose weights were compared."""
    equal: bool


class Recorder:
    """An observer that writes each step to a file."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("a", encoding="utf-8")
        self._parts: list[Any] = []

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        self._parts = run.parts

    @hookimpl
    def titan_step_end(self, report: Any) -> None:
        digest = hashlib.sha256()
        for part in self._parts:
            for _, parameter in part.named_parameters():
                digest.update(parameter.detach().numpy().tobytes())
        line = {"number": report.step, "time": time.monotonic(), "weights": digest.hexdigest()}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def train_group(number: int, lighthouse: str, recipe: str, overrides: Sequence[str], folder: Path) -> None:
    """Train one group in this process."""
    import torch

    from titan_core.api.config.resolved import Override
    from titan_core.config.load import load_config
    from titan_core.job.assemble import assemble
    from titan_core.loop.training import train
    from titan_core.plugins.registry import Components

    torch.set_num_threads(1)
    settings = {
        "training.local_batch_size": "1",
        "training.global_batch_size": "4",
        "training.seq_len": "64",
        "training.steps": "1000000",
        "metrics.log_freq": "100",
        "job.dump_folder": str(folder / f"group-{number}"),
        "fault_tolerance.enable": "true",
        "fault_tolerance.lighthouse": lighthouse,
        "fault_tolerance.replica_id": str(number),
        "fault_tolerance.process_group_timeout_ms": str(TIMEOUT_MS),
    }
    installed = Components.from_installed()
    for section in ("checkpoint", "sample"):
        if section in installed.sections():
            settings[f"{section}.enable"] = "false"
    pairs = zip(overrides[::2], overrides[1::2], strict=True)
    given = {**settings, **{key.removeprefix("--"): value for key, value in pairs}}
    config, registry = load_config(recipe, [Override(key, value) for key, value in given.items()], installed)
    train(assemble(config, registry, 1), [Recorder(folder / f"steps-{number}.jsonl")])


class Benchmark:
    """The lighthouse and the two groups."""

    def __init__(self, folder: Path, recipe: str, overrides: Sequence[str]) -> None:
        self._folder, self._recipe, self._overrides = folder, recipe, overrides
        self._lighthouse = ""
        self._processes: dict[str, subprocess.Popen[str]] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the lighthouse; end everything afterwards."""
        command = [sys.executable, "-m", "titan_core", "ft", "lighthouse", "--bind", "127.0.0.1:0"]
        command += ["--heartbeat-timeout-ms", str(HEARTBEAT_MS)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            address = server.stdout.readline().split()[-1]
            self._lighthouse = f"http://127.0.0.1:{address.rpartition(':')[2]}"
            yield
        finally:
            for process in [*self._processes.values(), server]:
                process.terminate()
            for process in [*self._processes.values(), server]:
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def start(self, number: int) -> float:
        """Start a group; return the time."""
        command = [sys.executable, "-m", "benchmarks.ft", "--group", str(number), "--lighthouse", self._lighthouse]
        command += ["--folder", str(self._folder), "--recipe", self._recipe, *self._overrides]
        with (self._folder / f"group-{number}.log").open("a", encoding="utf-8") as log:
            self._processes[str(number)] = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                text=True,
                cwd=Path(__file__).parents[1],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        return time.monotonic()

    def kill(self, number: int) -> float:
        """End a group by SIGKILL; return the time."""
        process = self._processes.pop(str(number))
        now = time.monotonic()
        process.send_signal(signal.SIGKILL)
        process.wait()
        return now

    def steps(self, number: int) -> list[Step]:
        """Return the steps that a group has recorded; the last line may be torn."""
        file = self._folder / f"steps-{number}.jsonl"
        lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
        found = []
        for line in lines:
            try:
                found.append(Step(**json.loads(line)))
            except json.JSONDecodeError:  # torn by a kill, and continued by the group's next process
                found.append(Step(**json.loads(line[line.rindex("{") :])))
        return found

    def wait_for(self, what: str, happened: Callable[[], bool]) -> None:
        """Wait until ``happened``.

        Raises:
            RuntimeError: a group has ended, or it takes too long.
        """
        deadline = time.monotonic() + PATIENCE
        while not happened():
            ended = [number for number, process in self._processes.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = [(self._folder / f"group-{number}.log").read_text(encoding="utf-8")[-3000:] for number in "01"]
                raise RuntimeError("\n".join([f"waiting for {what}; ended: {ended}", *logs]))
            time.sleep(0.02)

    def steps_since(self, number: int, moment: float) -> list[Step]:
        """Return the steps that a group has taken since ``moment``."""
        return [step for step in self.steps(number) if step.time > moment]


def measure(kills: int, recipe: str, overrides: Sequence[str] = ()) -> list[Kill]:
    """Kill a group ``kills`` times."""
    found = []
    with tempfile.TemporaryDirectory(prefix="titan-ft-") as folder:
        run = Benchmark(Path(folder), recipe, overrides)
        with run.running():
            started = [run.start(0), run.start(1)][-1]
            run.wait_for("both groups", lambda: all(len(run.steps_since(one, started)) >= TOGETHER for one in (0, 1)))
            for _ in range(kills):
                killed = run.kill(1)
                before = run.steps(0)
                run.wait_for("the survivor", lambda since=killed: len(run.steps_since(0, since)) >= ALONE)  # type: ignore[misc]
                restarted = run.start(1)
                run.wait_for(
                    "the return",
                    lambda since=restarted: len(run.steps_since(1, since)) >= TOGETHER,  # type: ignore[misc]
                )
                found.append(_result(run, before, killed, restarted))
            numbers = [step.number for step in run.steps(0)]
            if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
                raise RuntimeError(f"the survivor's step numbers have a gap: {numbers}")
    return found


def _result(run: Benchmark, before: list[Step], killed: float, restarted: float) -> Kill:
    survivor, other = run.steps(0), run.steps_since(1, restarted)
    seconds = [second.time - first.time for first, second in pairwise(before[-30:])]
    since = [step for step in survivor if step.time > killed]
    times = [killed, *(step.time for step in since if step.number <= other[0].number)]
    by_number = {step.number: step.weights for step in survivor}
    common = [step for step in other if step.number in by_number]
    return Kill(
        at_step=before[-1].number,
        longest_gap=max(second - first for first, second in pairwise(times)),
        usual=sorted(seconds)[len(seconds) // 2],
        alone=sum(step.number < other[0].number for step in since),
        back=other[0].time - restarted,
        compared=len(common),
        equal=all(step.weights == by_number[step.number] for step in common),
    )


def print_table(kills: Sequence[Kill]) -> None:
    """Print one row per kill."""
    print(
        "| kill | at step | usual step (s) | longest pause (s) | steps alone | back after (s) | weights after the return |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for number, kill in enumerate(kills, 1):
        weights = f"{'equal' if kill.equal else 'DIFFERENT'} in {kill.compared} steps"
        print(
            f"| {number} | {kill.at_step} | {kill.usual:.3f} | {kill.longest_gap:.2f} | {kill.alone} | {kill.back:.1f} "
            f"| {weights} |"
        )


def main() -> int:
    """Run the benchmark, or one of its groups."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--recipe", default="llama3_debug")
    parser.add_argument("--group", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lighthouse", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given, overrides = parser.parse_known_args()
    if given.group is not None:
        train_group(given.group, given.lighthouse, given.recipe, overrides, given.folder)
        return 0
    kills = measure(given.kills, given.recipe, overrides)
    print_table(kills)
    limit = (TIMEOUT_MS + HEARTBEAT_MS) / 1000
    late = [kill for kill in kills if kill.longest_gap > limit]
    print(f"\nlongest pause {max(kill.longest_gap for kill in kills):.2f} s; the timeouts allow {limit:g} s")
    return 1 if late or not all(kill.equal for kill in kills) else 0


if __name__ == "__main__":
    raise SystemExit(main())
