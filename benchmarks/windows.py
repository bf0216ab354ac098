"""Measures attention within a window on 4 ranks that divide each sequence: bytes that a rank sends and seconds of its core,
forward and backward, if all keys are gathered, if ranks send each other only what the window covers, and by heads.

    uv run python benchmarks/windows.py [--seq 8192] [--repeats 3]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from titan_core.api import CausalAttention, SequenceShare, causal_attention
from titan_parallel.context_parallel import DividedAttention, head_and_tail
from titan_parallel.head_exchange import HeadExchange, attention_by_heads
from titan_parallel.region_collectives import Ranks
from titan_parallel.ring_attention import attend_gathered

RANKS, BATCH, HEADS, KV_HEADS, WIDTH = 4, 1, 8, 4, 64


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank sends to others."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: object, arguments: tuple[Any, ...] = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        name = str(function)
        if "all_gather_into_tensor" in name:
            self.bytes += arguments[0].nbytes * (RANKS - 1)
        elif "reduce_scatter_tensor" in name:
            self.bytes += arguments[0].nbytes * (RANKS - 1) // RANKS
        elif "all_to_all_single" in name:
            rows, _, counts, _ = arguments
            others = sum(counts) - counts[dist.get_rank()]
            self.bytes += rows.nbytes // max(1, len(rows)) * others
        return function(*arguments, **(keywords or {}))


def measured(attend: Callable[..., Tensor], tensors: list[Tensor], repeats: int) -> tuple[int, float, Tensor]:
    """Return the bytes that this rank sends, the seconds of its core in the fastest pass, and the result."""
    with Sent() as sent:
        attend(*tensors).sum().backward()
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        result = attend(*tensors)
        result.sum().backward()
        seconds.append(time.process_time() - start)
    return sent.bytes, min(seconds), result.detach()


def measure(rank: int, port: int, seq: int, windows: list[int], repeats: int, results: Any) -> None:
    """Measure each window, and put the rows of rank 0 into ``results``: bytes of a rank, seconds of the slowest."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    ring, heads = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("ring", "heads"))
    share, exchange = SequenceShare(ring, head_and_tail(RANKS)), HeadExchange(Ranks(heads["heads"]))
    generator = torch.Generator().manual_seed(rank)
    shapes = ((HEADS, KV_HEADS, KV_HEADS), seq // RANKS)
    tensors = [torch.randn(BATCH, count, shapes[1], WIDTH, generator=generator, requires_grad=True) for count in shapes[0]]
    for window in windows:
        mixer = causal_attention(HEADS, KV_HEADS, window=window)
        ways: dict[str, Callable[..., Tensor]] = {
            "gathered": lambda q, k, v, window=window: attend_gathered(share, q, k, v, None, window=window),
            "window": DividedAttention(share, mixer, passed=False).forward,
            "heads": attention_by_heads(exchange, CausalAttention(window=window).forward),
        }
        row: list[Any] = [window]
        outputs = []
        for attend in ways.values():
            sent, seconds, output = measured(attend, tensors, repeats)
            most = torch.tensor([float(sent), seconds])
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            row.extend(most.tolist())
            outputs.append(output)
        torch.testing.assert_close(outputs[1], outputs[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(outputs[2], outputs[0], atol=1e-4, rtol=1e-4)
        if rank == 0:
            results.put(row)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    windows = [arguments.seq // part for part in (64, 32, 16, 8, 4, 2)]
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    results = context.Queue()
    more = (store.port, arguments.seq, windows, arguments.repeats, results)
    ranks = [context.Process(target=measure, args=(rank, *more), daemon=True) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    print("| window | window / sequence | gathered | | within the window | | by heads | |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for _ in windows:
        window, *numbers = results.get(timeout=600)
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        cells = [f"{sent / 2**20:.2f} MiB | {seconds:.2f} s" for sent, seconds in pairs]
        print(f"| {window} | 1/{arguments.seq // window} | {' | '.join(cells)} |", flush=True)
    for process in ranks:
        process.join()


if __name__ == "__main__":
    main()
