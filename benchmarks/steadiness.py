"""Measures whether a step is as fast after a checkpoint as before the first one, and whether a long run grows.

Each job trains the debug recipe on all cores, in a process of its own: some steps, then a save, and as many steps once the
save is complete. Jobs that save in the background, synchronously and not at all take turns, so that other load affects all
of them; the last kind says how much it changes with time.

The context switches of a step tell the same on a busy machine too: a thread that waits for its team spins, unless the
process has more threads in teams than there are cores. Then it sleeps, and each operator wakes it up.

    uv run python -m benchmarks.steadiness [--rounds 5] [--steps 40]

The exit status is 1 if the median ratio of a kind that saves, divided by that of the kind that does not, is above 1.05.

    OMP_NUM_THREADS=1 uv run python -m benchmarks.steadiness --long 100000

takes so many steps of a model of some thousand parameters in one process, with all that the default recipe does beside:
records, checkpoints in the background, validation, samples. Twenty times on the way it counts what the process holds. The
exit status is 1 if something still grows in the second half (:func:`growth_of`). Other load makes the CPU time of a step
grow.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from titan_core.api import hookimpl

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


TINY = {
    "job.device": "cpu",
    "model.args": "{dim = 16, n_layers = 1, n_heads = 2, n_kv_heads = 1, ffn_dim = 16}",
    "training.seq_len": 16,
    "training.local_batch_size": 1,
    "training.global_batch_size": 2,
    "metrics.log_freq": 10,
    "checkpoint.enable": "true",
    "checkpoint.async_mode": "async",
    "checkpoint.keep_latest_k": 2,
    "validation.enable": "true",
    "validation.dataset": "stdlib",
    "validation.steps": 2,
    "sample.enable": "true",
    "sample.max_new_tokens": 4,
}
"""Settings of the debug recipe for steps of some milliseconds."""


@dataclass(frozen=True)
class Held:
    """What a process holds after a step."""

    step: int
    steps_per_second: float
    """Since the sample before, like the following."""
    cpu_ms: float
    """CPU time of a step, of all threads."""
    rss_mib: float
    malloc_mib: float
    """Bytes that glibc's allocator has handed out, to torch too; 0 without glibc. If it stays while the resident set grows,
    pages are touched for the first time that the allocators hold."""
    tensors: int
    tensor_kib: float
    """Bytes of their storages."""
    objects: int
    """Those that Python's garbage collector knows."""
    blocks: int
    """Those that Python's allocator has handed out."""
    descriptors: int
    threads: int
    files: int
    """In the run's directory."""


class Samples:
    """An observer that counts what the process holds, every so many steps."""

    def __init__(self, every: int) -> None:
        self._every = every
        self.held: list[Held] = []

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        """Start the clock."""
        self._folder, self._began = Path(run.dump_folder), (time.perf_counter(), time.process_time())

    @hookimpl(trylast=True)
    def titan_step_end(self, report: Any) -> None:
        """Count what remains once garbage is collected."""
        if report.step % self._every:
            return
        import torch

        seconds, cpu = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        gc.collect()
        objects = gc.get_objects()
        tensors = [one for one in objects if type(one) in (torch.Tensor, torch.nn.Parameter)]
        storages = {(one.untyped_storage().data_ptr(), one.untyped_storage().nbytes()) for one in tensors}
        self.held.append(
            Held(
                step=report.step,
                steps_per_second=self._every / seconds,
                cpu_ms=1000 * cpu / self._every,
                rss_mib=int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20,
                malloc_mib=malloc_bytes() / 2**20,
                tensors=len(tensors),
                tensor_kib=sum(size for _, size in storages) / 1024,
                objects=len(objects) - len(self.held),
                blocks=sys.getallocatedblocks(),
                descriptors=len(os.listdir("/proc/self/fd")),
                threads=len(os.listdir("/proc/self/task")),
                files=sum(len(names) for _, _, names in os.walk(self._folder)),
            )
        )
        del objects, tensors, storages
        self._began = time.perf_counter(), time.process_time()


class _Mallinfo(ctypes.Structure):
    _fields_ = [(f"field{number}", ctypes.c_size_t) for number in range(10)]


def malloc_bytes() -> int:
    """Return the bytes that the process has allocated by malloc: ``hblkhd`` and ``uordblks`` of glibc's ``mallinfo2``."""
    find = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if find is None:
        return 0
    find.restype = _Mallinfo
    found = find()
    return int(found.field4 + found.field7)


def long_run(steps: int, samples: int = 20) -> list[Held]:
    """Take ``steps`` steps, and return what the process held on the way."""
    from titan_core.loop.training import train
    from titan_testing.jobs import make_job

    often = steps // samples
    settings = {
        **TINY,
        "training.steps": steps,
        "checkpoint.interval": often // 2,
        "validation.freq": often // 2,
        "sample.freq": often // 2,
    }
    observer = Samples(often)
    with tempfile.TemporaryDirectory() as folder:
        train(make_job("llama3_debug", {**settings, "job.dump_folder": folder}), [observer])
    return observer.held


MOST = {"rss_mib": 32 / 2**20, "malloc_mib": 16 / 2**20, "objects": 0.05, "blocks": 0.05}
"""Growth that a step may add, of figures that go up and down by themselves: 32 bytes of pages, 16 of allocations, an object
and a block in 20 steps."""


def growth_of(held: Sequence[Held]) -> list[str]:
    """Return what grows in the second half of a run, one line each: the least CPU time of a step by more than 5 %, a mean of
    the figures in ``MOST`` from the second quarter to the last by more than that a step, any other figure at all."""
    middle, quarter = len(held) // 2, len(held) // 4
    first, second = held[1:middle], held[middle:]  # the first has caches to fill
    found = []
    for one in fields(Held)[2:]:
        before, after = ([getattr(sample, one.name) for sample in half] for half in (first, second))
        if one.name == "cpu_ms":
            grows = min(after) > LIMIT * min(before)
        elif one.name in MOST:
            steps = held[-1].step - held[middle - 1].step
            grows = statistics.fmean(after[-quarter:]) - statistics.fmean(before[-quarter:]) > MOST[one.name] * steps
        else:
            grows = max(after) > max(before)
        if grows:
            found.append(f"{one.name}: {max(before):,.2f} in the first half, {max(after):,.2f} in the second")
    return found


def report_of(held: Sequence[Held]) -> int:
    """Print what a process held during a long run, and what grew; return the exit status."""
    import torch

    names = [one.name for one in fields(Held)]
    print(f"\ntorch {torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} CPUs\n")
    print("| " + " | ".join(name.replace("_", " ") for name in names) + " |")
    print("| ---: " * len(names) + "|")
    for sample in held:
        values = (getattr(sample, name) for name in names)
        print("| " + " | ".join(f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" for value in values) + " |")
    growth = growth_of(held)
    print("\n" + ("\n".join(f"grows: {line}" for line in growth) or "nothing grows"))
    return bool(growth)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="jobs of each kind")
    parser.add_argument("--steps", type=int, default=40, help="steps before and after the save")
    parser.add_argument("--long", type=int, metavar="STEPS", help="take so many steps, and count what the process holds")
    parser.add_argument("--job", choices=MODES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        one_job(arguments.job, arguments.steps)
        return 0
    if arguments.long:
        return report_of(long_run(arguments.long))
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
