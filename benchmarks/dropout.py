"""Measures forward and backward of :class:`titan_core.api.Dropout`, compared with ``torch.nn.Dropout``.

Both run in turns in one process, so that other load on the machine affects both. The ratio is that of the medians.

    uv run python benchmarks/dropout.py [--shape 4 512 1024] [--dtype float32] [--device cpu] [--rounds 30]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

from titan_core.api import Batch, Dropout, Microbatch
from titan_core.api.parallel.microbatch import microbatch_scope


def seconds(module: nn.Module, hidden: Tensor, gradient: Tensor) -> float:
    """Return the time of one forward and backward."""
    hidden.grad = None
    synchronize(hidden.device)
    started = time.perf_counter()
    module(hidden).backward(gradient)
    synchronize(hidden.device)
    return time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", type=int, nargs=3, default=(4, 512, 1024), metavar=("BATCH", "SEQ", "FEATURES"))
    parser.add_argument("--p", type=float, default=0.1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    batch, seq, _ = arguments.shape
    hidden = torch.randn(arguments.shape, dtype=getattr(torch, arguments.dtype), device=device, requires_grad=True)
    gradient = torch.randn_like(hidden)
    tokens = torch.zeros(batch, seq, dtype=torch.int64, device=device)
    microbatch = Microbatch(Batch(tokens, tokens, rows=torch.arange(batch, device=device)), step=1, seed=0)
    theirs, ours = nn.Dropout(arguments.p), Dropout(arguments.p)
    ours.begin("blocks.0.dropout", device)
    taken: dict[nn.Module, list[float]] = {theirs: [], ours: []}
    with microbatch_scope(microbatch):
        for number in range(arguments.rounds + 3):
            for module in (theirs, ours) if number % 2 else (ours, theirs):
                took = seconds(module, hidden, gradient)
                if number >= 3:  # the first rounds compile and fill caches
                    taken[module].append(took)
    medians = [statistics.median(taken[module]) for module in (theirs, ours)]
    print(f"{list(arguments.shape)} {arguments.dtype} on {device}, {torch.get_num_threads()} threads, p = {arguments.p}")
    print(f"nn.Dropout {1e3 * medians[0]:.2f} ms, Dropout {1e3 * medians[1]:.2f} ms: ratio {medians[1] / medians[0]:.2f}")


if __name__ == "__main__":
    main()
