"""Measures whether a step is as fast after a checkpoint as before the first one.

Each job trains the debug recipe on all cores, in a process of its own: some steps, then a save, and as many steps once the
save is complete. Jobs that save in the background, synchronously and not at all take turns, so that other load affects all
of them; the last kind says how much it changes with time.

The context switches of a step tell the same on a busy machine too: a thread that waits for its team spins, unless the
process has more threads in teams than there are cores. Then it sleeps, and each operator wakes it up.

    uv run python -m benchmarks.steadiness [--rounds 5] [--steps 40]

The exit status is 1 if the median ratio of a kind that saves, divided by that of the kind that does not, is above 1.05.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

LIMIT = 1.05
MODES = {"none": None, "sync": "disabled", "async": "async"}


def one_job(mode: str, steps: int) -> None:
    """Train, save, train, and print the seconds and context switches of a step before and after the save, and both numbers
    of threads."""
    import torch

    from titan_ckpt.save.saving import Saving
    from titan_core.api.config.resolved import Override
    from titan_core.config.load import load_config
    from titan_core.data.streams import OpenedData
    from titan_core.job.assemble import assemble
    from titan_core.loop.trainer import Trainer
    from titan_core.loop.world import join_world
    from titan_core.plugins.lifecycle import Lifecycle
    from titan_core.plugins.registry import Components
    from titan_core.runlog.run_directory import RunDirectory

    settings = {
        "job.dump_folder": tempfile.mkdtemp(),
        "job.device": "cpu",
        "training.steps": "100000",
        "metrics.log_freq": "100000",
        "sample.enable": "false",
        "checkpoint.enable": "true",
        "checkpoint.interval": "100000",
        "checkpoint.async_mode": MODES[mode] or "disabled",
    }
    config, registry = load_config(
        "llama3_debug", [Override(*pair) for pair in settings.items()], Components.from_installed()
    )
    job = assemble(config, registry, 1)
    with join_world(job) as world:
        trainer = Trainer(job, world, OpenedData.of(job), Lifecycle(), RunDirectory.create(job.dump_folder))
        trainer.lifecycle.train_start(trainer.run_start())

        def measured() -> dict[str, float]:
            seconds, before = [], resource.getrusage(resource.RUSAGE_SELF)
            for _ in range(steps):
                started = time.perf_counter()
                trainer.step()
                seconds.append(time.perf_counter() - started)
            after = resource.getrusage(resource.RUSAGE_SELF)
            return {
                "ms": 1000 * statistics.median(seconds),
                "cpu ms": 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / steps,
                "switches": (after.ru_nvcsw - before.ru_nvcsw) / steps,
                "threads": len(os.listdir("/proc/self/task")),
            }

        for _ in range(5):
            trainer.step()
        found = {"threads": torch.get_num_threads(), "before": measured()}
        if MODES[mode] is not None:
            store: Any = trainer.checkpoints
            saving: Saving = store._saving
            saving.save(last=False)
            trainer.step()  # whose update waits for the copies of a save in the background
            saving.finish_pending()
        for _ in range(2):
            trainer.step()
        found["after"] = measured()
        trainer.close()
    print(json.dumps(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="jobs of each kind")
    parser.add_argument("--steps", type=int, default=40, help="steps before and after the save")
    parser.add_argument("--job", choices=MODES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        one_job(arguments.job, arguments.steps)
        return 0
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for number in range(arguments.rounds):
        for mode in list(MODES) if number % 2 else reversed(MODES):
            command = [sys.executable, "-m", "benchmarks.steadiness", "--job", mode, "--steps", str(arguments.steps)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[mode].append(json.loads(done.stdout.splitlines()[-1]))
    import torch

    threads = found["none"][0]["threads"]
    print(f"\ntorch {torch.__version__}, {threads} threads, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}\n")
    print("| save | step before, ms | step after, ms | ratio | CPU ms a step | context switches a step | OS threads |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    ratios = {}
    for mode, jobs in found.items():
        ratios[mode] = statistics.median(job["after"]["ms"] / job["before"]["ms"] for job in jobs)
        of = {(when, what): statistics.median(job[when][what] for job in jobs)
              for when in ("before", "after") for what in jobs[0][when]}  # fmt: skip
        figures = (f"{of['before', what]:,.0f} to {of['after', what]:,.0f}" for what in ("cpu ms", "switches", "threads"))
        print(
            f"| {mode} | {of['before', 'ms']:.1f} | {of['after', 'ms']:.1f} | {ratios[mode]:.3f} | "
            + " | ".join(figures)
            + " |"
        )
    slower = {mode: ratio / ratios["none"] for mode, ratio in ratios.items() if ratio / ratios["none"] > LIMIT}
    print("\n" + (f"slower after a save: {slower}" if slower else f"as fast after a save as before, within {LIMIT}"))
    return bool(slower)


if __name__ == "__main__":
    sys.exit(main())
