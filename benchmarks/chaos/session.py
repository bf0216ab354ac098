"""The undisturbed job, and the disturbed one: from its start to the comparison of the two."""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.chaos.cluster import ChaosFailure, Cluster, environment, titan_train, wait_until_gone
from benchmarks.chaos.faults import KINDS, MANIFEST, Scene, step_of
from benchmarks.chaos.report import HEAD, Report, Struck, row
from benchmarks.chaos.site.titan_chaos import GATE, TRAIL
from benchmarks.chaos.trail import attempts_in, differences, lost_steps, trajectory
from benchmarks.chaos.watch import Watch
from titan_core.toolkit.json_lines import read_lines
from titan_core.toolkit.runs.files import METRICS

SEQUENCES = 8
"""``training.global_batch_size`` of the recipe."""
INTERVAL = 2
"""``checkpoint.interval`` of the recipe."""
MARGIN = 4 * INTERVAL
"""Number of steps that are left after the last fault: a save must fail on a full disk, and be reported, before the last."""
MOST_DIFFERENT = 1e-6
"""Largest relative difference between losses."""
POLL_SECONDS = 0.01
GONE_SECONDS = 30.0
"""How long processes may take to end after the job."""
TRIGGERS = ("step", "checkpoint", "save")
"""The events that faults follow: a step was reported, a checkpoint is complete, a save has begun."""


@dataclass(frozen=True)
class Trained:
    """What a job did."""

    tokens: dict[int, dict[int, str]]
    """By step: digest of each sequence of the global batch."""
    records: dict[int, dict[str, Any]]
    """By step: the line of the metrics."""
    positions: Any
    """The position in the data after the last step, as its checkpoint has it."""


def undisturbed(folder: Path, ranks: int, overrides: Sequence[str], limit: float) -> Trained:
    """Train the job without a fault.

    Args:
        limit: longest time until it ends, in seconds.

    Raises:
        ChaosFailure: it failed.
    """
    (folder / TRAIL).mkdir(parents=True)
    command = titan_train(folder / "run", overrides, ["--nproc-per-node", str(ranks)])
    with (folder / "titan.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment(folder), cwd=folder)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            raise ChaosFailure(f"the undisturbed job did not end within {limit:g} s; see {folder / 'titan.log'}") from None
    if status:
        raise ChaosFailure(f"the undisturbed job ended with status {status}; see {folder / 'titan.log'}")
    tokens, problems = trajectory(attempts_in(folder), SEQUENCES)
    if problems:
        raise ChaosFailure(f"the undisturbed job: {problems[0]}")
    return Trained(tokens, _records(folder / "run"), _positions(folder / "checkpoint"))


class Session:
    """The disturbed job. A context manager that leaves no process behind."""

    def __init__(self, folder: Path, ranks: int, overrides: Sequence[str], limit: float, report: Report) -> None:
        """
        Args:
            limit: longest wait for an event, in seconds.
            report: receives what happens.
        """
        self._folder, self._ranks, self._limit, self._report = folder, ranks, limit, report
        self._checkpoints = folder / "disk" / "checkpoint"
        (folder / TRAIL).mkdir()
        self._watch = Watch(folder / "run")
        self._cluster = Cluster(folder, folder / "run", ranks, overrides)
        self._allow(0)

    def __enter__(self) -> Session:
        self._cluster.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._cluster.close()
        left = wait_until_gone(self._folder, GONE_SECONDS)
        self._report.problems += [f"process {pid} is left over: {command}" for pid, command in left.items()]
        self._report.exits = dict(Counter(str(status) for _, status in self._cluster.exits))

    def disturb(self, kinds: Sequence[str], steps: int, chance: random.Random, say: Callable[[str], None]) -> None:
        """Strike with each fault in turn, and wait until the job has recovered from it.

        Args:
            steps: number of steps of the job.

        Raises:
            ChaosFailure: it does not recover.
        """
        say(HEAD)
        for number, kind in enumerate(kinds, 1):
            # The draws do not depend on what happened before, so that a seed means the same faults.
            scene = self._scene(random.Random(chance.getrandbits(64)))
            trigger = scene.chance.choice(TRIGGERS)
            left = steps - MARGIN - self._watch.step
            self._await(trigger, self._watch.step + max(1, left // (len(kinds) - number + 1)), steps)
            fault = Struck(kind, trigger, self._watch.step)
            began = time.time()
            try:
                fault.detail = KINDS[kind](scene)
            except ChaosFailure as failure:
                raise ChaosFailure(f"fault {number}, {kind} after step {fault.step}: {failure}") from None
            self._measure(fault, began)
            self._report.faults.append(fault)
            say(row(number, fault))

    def finish(self, steps: int) -> None:
        """Let the job train its last steps, and wait until every process has ended.

        Raises:
            ChaosFailure: it does not end.
        """
        self._allow(steps)
        self._wait("the end of the job", lambda: self._cluster.done)
        left = wait_until_gone(self._folder, GONE_SECONDS)
        if left:
            raise ChaosFailure(f"processes are left over after the job: {left}")

    def compare(self, expected: Trained) -> list[str]:
        """Return how the job differs from the undisturbed one."""
        tokens, problems = trajectory(attempts_in(self._folder), SEQUENCES)
        problems += differences(tokens, expected.tokens)
        records = _records(self._folder / "run")
        if records.keys() != expected.records.keys():
            return [*problems, f"the run log has the steps {_ranges(records)}, expected {_ranges(expected.records)}"]
        largest = 0.0
        for step, record in records.items():
            other = expected.records[step]
            if record["tokens_seen"] != other["tokens_seen"]:
                problems.append(f"step {step}: {record['tokens_seen']} tokens seen, expected {other['tokens_seen']}")
            largest = max(largest, _difference(record["loss"], other["loss"]))
        if largest > MOST_DIFFERENT:
            problems.append(f"losses differ by up to {largest:.1e} (relative); the most allowed is {MOST_DIFFERENT:g}")
        if _positions(self._checkpoints) != expected.positions:
            problems.append("the last checkpoint has another position in the data")
        self._report.largest_difference, self._report.compared_steps = largest, len(records)
        return problems

    def _scene(self, chance: random.Random) -> Scene:
        return Scene(self._cluster, self._watch, self._checkpoints, self._ranks, self._wait, chance)

    def _await(self, trigger: str, step: int, steps: int) -> None:
        """Let the job train up to about ``step``, and wait for the event of that step or a later one."""
        # Ranks run on while a fault strikes, but the job must not end before the last one.
        self._allow(min(step + INTERVAL, steps - 1))
        watch, attempt = self._watch, self._watch.attempt
        since = 0.0 if attempt is None else attempt["time"]

        def reached() -> bool:
            if watch.step >= steps:
                raise ChaosFailure("the job ended before all faults had struck; increase --steps")
            if trigger == "step":
                return watch.step >= step
            if trigger == "checkpoint":
                return any(event["step"] >= step for event in watch.of("checkpoint", since))
            return any(step_of(path) >= step and _began(path) > since for path in self._checkpoints.glob("step-*"))

        self._wait(f"the event {trigger!r} of step {step}", reached)
        # An older checkpoint must exist, to resume from if the newest one is destroyed.
        self._wait("two checkpoints", lambda: len(list(self._checkpoints.glob(f"step-*/{MANIFEST}"))) >= 2)

    def _allow(self, step: int) -> None:
        """Let the job train at full speed up to ``step``."""
        part = self._folder / f"{GATE}.part"
        part.write_text(str(step))
        part.replace(self._folder / GATE)

    def _wait(self, what: str, condition: Callable[[], object]) -> None:
        """Wait for a condition, and keep the agents running.

        Raises:
            ChaosFailure: it takes too long, or an agent ended for good.
        """
        end = time.monotonic() + self._limit
        while True:
            self._watch.poll()
            self._cluster.supervise()
            if condition():
                return
            if self._cluster.done:
                raise ChaosFailure(f"the job ended while waiting for {what}")
            if time.monotonic() > end:
                raise ChaosFailure(f"waited {self._limit:g} s in vain for {what}")
            time.sleep(POLL_SECONDS)

    def _measure(self, fault: Struck, began: float) -> None:
        """Add to a fault how the job recovered from it."""
        now = time.time()
        attempts = attempts_in(self._folder)
        after = [attempt for attempt in attempts if attempt.time > began]
        fault.whole = now - began
        fault.attempts = len(after)
        fault.resumed = after[0].begun if after else fault.step
        fault.lost = lost_steps(attempts, SEQUENCES, began, now)
        ended = [attempt.ended[step] for attempt in after for step in attempt.complete(SEQUENCES)]
        fault.first_step = min(ended) - began


def _difference(loss: float | None, expected: float | None) -> float:
    """Return the relative difference of two losses, infinite if one is not finite (``None`` in the metrics)."""
    return float("inf") if loss is None or expected is None else abs(loss - expected) / abs(expected)


def _records(run: Path) -> dict[int, dict[str, Any]]:
    return {record["step"]: record for record in read_lines(run / METRICS)}


def _positions(checkpoints: Path) -> Any:
    """Return the position in the data of the newest checkpoint."""
    newest = max(checkpoints.glob(f"step-*/{MANIFEST}"), key=lambda path: step_of(path.parent), default=None)
    if newest is None:
        return None
    return json.loads(newest.read_text())["checkpoint"]["state"]["loader"]["shards"]


def _began(checkpoint: Path) -> float:
    """Return when a checkpoint was begun, as far as is known; 0 if it has just been removed."""
    try:
        return checkpoint.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _ranges(steps: dict[int, Any]) -> str:
    return f"{min(steps)} to {max(steps)} ({len(steps)} of them)" if steps else "none"
