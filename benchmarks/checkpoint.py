"""Measures the cost of saving a checkpoint, synchronously and in the background, compared with writing the same bytes.

One process takes turns to (1) write the same number of bytes to one file with fsync; (2) save a checkpoint; (3) save a
checkpoint in the background. For (3), only the time that blocks training counts: the copy is made during forward and
backward of the next step. Peak memory is the growth of the process while it saves, measured in a separate round without
forward and backward.

    uv run python benchmarks/checkpoint.py
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from titan_ckpt.config import CheckpointSection
from titan_ckpt.contents.optimizer_state import group_values, parameter_names, state_of
from titan_ckpt.contents.tensors import model_tensors
from titan_ckpt.format.folder import Folder
from titan_ckpt.resume.optimizer_restore import initialise_state
from titan_ckpt.save.saving import Saving
from titan_core.api import Batch, CheckpointContext, StepInput
from titan_core.api.config.resolved import Override
from titan_core.config.load import load_config
from titan_core.data.streams import OpenedData
from titan_core.job.assemble import assemble
from titan_core.loop.trainer import Trainer
from titan_core.loop.world import join_world
from titan_core.plugins.lifecycle import Lifecycle
from titan_core.plugins.registry import Components
from titan_core.runlog.run_directory import RunDirectory

MIB = 2**20


class Peak:
    """The peak growth of the process's memory, sampled every 2 ms."""

    bytes = 0

    def __init__(self) -> None:
        self._before, self._done = held(), threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.bytes = max(self.bytes, held() - self._before)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Sample while the context is active."""
        self._thread.start()
        try:
            yield
        finally:
            self._done.set()
            self._thread.join()


def held() -> int:
    """Return the resident memory of the process, in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def write_plainly(path: str, data: memoryview, num_bytes: int) -> float:
    """Return the seconds to write ``num_bytes`` to a file with fsync."""
    started = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        written = 0
        while written < num_bytes:
            written += file.write(data[: min(len(data), num_bytes - written)])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    os.unlink(path)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=1024, help="width of the model's hidden states")
    parser.add_argument("--folder", help="where to write (default: a temporary folder in the current one)")
    arguments = parser.parse_args()
    root = tempfile.mkdtemp(dir=arguments.folder or ".")
    size = f"{{dim = {arguments.width}, n_layers = 6, ffn_dim = {3 * arguments.width}}}"
    settings = {"model.args": size, "checkpoint.enable": "true", "checkpoint.async_mode": "async",
                "checkpoint.keep_latest_k": "1", "job.dump_folder": root}  # fmt: skip
    overrides = [Override(key, value) for key, value in settings.items()]
    config, registry = load_config("llama3_debug", overrides, Components.from_installed())
    job = assemble(config, registry, 1)
    plain, saved, blocked, whole = [], [], [], []
    with join_world(job) as world:
        trainer = Trainer(job, world, OpenedData.of(job), Lifecycle([]), RunDirectory.create(root))
        state = trainer.state
        initialise_state(state.optimizer)
        kept = state_of(parameter_names(state.parts), state.optimizer, group_values(state.optimizer))
        tensors = {**model_tensors(state.parts), **kept.tensors}
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        context = CheckpointContext(
            section=config.section(CheckpointSection), job=job, world=world, state=state,
            lifecycle=trainer.lifecycle, lock_folder=lambda folder, where: None,
        )  # fmt: skip
        saving = Saving(context, Folder(root))
        batches = [Batch(torch.zeros(4, 256, dtype=torch.int64), torch.zeros(4, 256, dtype=torch.int64))]
        data = memoryview(torch.zeros(64 * MIB, dtype=torch.uint8).random_(256).numpy())
        peaks = {"synchronous": Peak(), "background": Peak()}
        for number in range(arguments.rounds + 1):
            state.step += 1
            plain.append(write_plainly(f"{root}/plain", data, num_bytes))
            started = time.perf_counter()
            with peaks["synchronous"].watching() if number == 0 else nullcontext():
                saving.save(last=True)
            saved.append(time.perf_counter() - started)
            state.step += 1
            started = time.perf_counter()
            with peaks["background"].watching() if number == 0 else nullcontext():
                saving.save(last=False)
                waited = time.perf_counter() - started
                if number > 0:
                    trainer.run_step(StepInput(batches, state.step, 0))  # forward and backward of the next step
                before_update = time.perf_counter()
                saving.wait_for_copy()
                blocked.append(waited + time.perf_counter() - before_update)
                saving.finish_pending()
            whole.append(time.perf_counter() - started)
        saving.close()
        trainer.close()
    shutil.rmtree(root)
    times = {name: statistics.median(seconds[1:]) for name, seconds in
             {"plain": plain, "saved": saved, "blocked": blocked, "whole": whole}.items()}  # fmt: skip
    print(f"\ntorch {torch.__version__}, CPU; {num_bytes / MIB:,.0f} MiB of weights and optimizer state\n")
    print(f"plain write with fsync        {num_bytes / MIB / times['plain']:8,.0f} MiB/s")
    print(f"synchronous save              {num_bytes / MIB / times['saved']:8,.0f} MiB/s, "
          f"{times['plain'] / times['saved']:.2f} of a plain write; "
          f"extra memory {peaks['synchronous'].bytes / MIB:,.0f} MiB")  # fmt: skip
    print(f"background save               blocks training for {times['blocked'] * 1000:,.0f} ms, "
          f"{times['blocked'] / times['saved']:.3f} of a synchronous save; done after {times['whole'] * 1000:,.0f} ms; "
          f"extra memory {peaks['background'].bytes / MIB:,.0f} MiB")  # fmt: skip


if __name__ == "__main__":
    main()
