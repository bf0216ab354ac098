"""Costs of the control plane by number of ranks, without the ranks: rendezvous, comparison of jobs, counts of a step, stop
requests and checkpoints.

    uv run python -m benchmarks.control_plane [--ranks 64 256 1024 4096] [--parts abce] [--tensors 100] [--collector]
"""

from __future__ import annotations

import argparse
import gc
import platform

import torch

from benchmarks.control_plane import commit, exchange, gloo, rendezvous, start, table
from titan_core.config.load import load_config
from titan_core.job.assemble import assemble
from titan_core.plugins.registry import Components

REQUESTS = 3
"""Shared requests of every run: stop, interrupt and save."""
NOTES = """
Measured: all CPU seconds. (a) a real TCPStore and a real client per rank, which set and get the keys that gloo does in that
order; rank 0 has the store. (b), (c), (d) Titan's functions on two ranks of N; the values of the others are handed to them.
(e) Titan's save and load on two of N ranks; the other ranks have the same tensors at other places.
Counted: messages and bytes, sent and received. (b), (c), (e): those of Titan's tree, of depth log2(N); sums of up to 32
ranks are gloo's ring, twice round. Broadcasts, by a model: a binomial tree.
Not in it: time on the wire, waiting, and gloo's own CPU time, which the line on gloo shows for few ranks.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument(
        "--parts", default="abce", help="a needs an open file for each rank, e an entry for each rank and tensor"
    )
    parser.add_argument("--tensors", type=int, default=100, help="tensors of a checkpoint, each divided among all ranks")
    parser.add_argument("--collector", action="store_true", help="leave the garbage collector on while saving and restoring")
    arguments = parser.parse_args()
    if min(arguments.ranks) < 2:
        parser.error("--ranks: a control plane needs at least 2 ranks")
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}")
    print(NOTES)
    config, registry = load_config("llama3_debug", [], Components.from_installed())
    job = assemble(config, registry, 1)
    job.digest()
    print(*table.HEADER, sep="\n")
    manifests: dict[int, int] = {}
    for ranks in sorted(arguments.ranks):
        rows = [rendezvous.rendezvous(ranks)] if "a" in arguments.parts else []
        if "b" in arguments.parts:
            rows += [exchange.same_job(job, ranks, differs) for differs in (False, True)]
            rows += [exchange.stages(ranks), exchange.generators(ranks)]
        if "c" in arguments.parts:
            rows += [exchange.counts(ranks, requests) for requests in (0, REQUESTS)]
        if "e" in arguments.parts:
            saved, manifests[ranks] = commit.checkpoint(ranks, arguments.tensors, arguments.collector)
            rows += saved
        for row in rows:
            print(table.line(row), flush=True)
        gc.collect()
    print(
        f"\nManifest of {arguments.tensors} tensors, MB:",
        ", ".join(f"{n}: {size / 1e6:.1f}" for n, size in manifests.items()),
    )
    for ranks in sorted(arguments.ranks):
        start.report(ranks)
    hop, step = gloo.report()
    for ranks in sorted(arguments.ranks):
        hops, rounds = 2 * (ranks - 1), 2 * (ranks - 1).bit_length()
        ring = f"in a ring {hops} hops: {hops * hop:.3f} s"
        print(f"model: {ranks} ranks: a sum has {rounds} rounds: {rounds * step:.4f} s; {ring}")


if __name__ == "__main__":
    main()
