"""Measures a step of Muon on several ranks: each matrix on the rank that owns it (titan-optim), and gathered on every rank
(the example titan-optim-muon).

The ranks are processes on this machine that divide the rows of 24 matrices, as FSDP does. Both forms run in turns, so that
other load affects both; a time is the median of the slowest rank's.

    uv run python benchmarks/muon.py [--ranks 4] [--rounds 7] [--threads 1] [--types float32 bfloat16]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import Optimizer

from titan_core.api import OptimizerSection
from titan_optim.config import MuonSection
from titan_optim.matrices import Matrices
from titan_optim.muon import Muon

EXAMPLE = Path(__file__).parents[1] / "examples/titan-optim-muon/src"
SHAPES = [(1408, 512), (512, 1408), (512, 512), (512, 512)] * 6
GROUP = {"lr": 0.02, "weight_decay": 0.1}


def owned(parameters: list[nn.Parameter], dtype: str) -> Optimizer:
    """Return titan-optim's Muon."""
    matrices = {one: Matrices(one, (one.shape[0],)) for one in parameters}
    section = MuonSection.model_validate({"dtype": dtype})
    return Muon([{"params": parameters, "muon": True, **GROUP}], matrices, section, OptimizerSection(), torch.device("cpu"))


def gathered(parameters: list[nn.Parameter], dtype: str) -> Optimizer:
    """Return the example's Muon."""
    sys.path.insert(0, str(EXAMPLE))
    section = import_module("titan_optim_muon.config").MuonSection.model_validate({"dtype": dtype})
    found: Any = import_module("titan_optim_muon.muon").Muon
    optimizer: Optimizer = found([{"params": parameters, **GROUP}], [], section, OptimizerSection())
    return optimizer


FORMS: dict[str, Callable[[list[nn.Parameter], str], Optimizer]] = {"titan-optim": owned, "gathered": gathered}


def measure(rank: int, ranks: int, rounds: int, threads: int, types: list[str], folder: str) -> None:
    """Time the steps of all forms on one rank, and print the table on the first."""
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", store=dist.FileStore(os.path.join(folder, "store"), ranks), rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    built = {}
    for form, build in FORMS.items():
        for dtype in types:
            parameters = [nn.Parameter(distribute_tensor(torch.randn(shape), mesh, [Shard(0)])) for shape in SHAPES]
            for one in parameters:
                one.grad = torch.randn_like(one)
            built[form, dtype] = build(parameters, dtype)
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in built}
    for number in range(rounds + 1):
        for key, optimizer in built.items():
            dist.barrier()
            started = time.perf_counter()
            optimizer.step()
            slowest = torch.tensor(time.perf_counter() - started)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if number:  # the first step makes the state and the plan
                seconds[key].append(slowest.item())
    if rank == 0:
        print(f"torch {torch.__version__}, {ranks} ranks of {threads} threads, {os.cpu_count()} CPUs; seconds of a step\n")
        print(f"| form | {' | '.join(types)} |\n| --- |{' ---: |' * len(types)}")
        for form in FORMS:
            print(f"| {form} | {' | '.join(f'{statistics.median(seconds[form, dtype]):.2f}' for dtype in types)} |")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--types", nargs="+", default=["float32"], help="of the iterations; bfloat16 needs a processor with it"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given = (arguments.ranks, arguments.rounds, arguments.threads, arguments.types, folder)
        multiprocessing.start_processes(measure, given, arguments.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
