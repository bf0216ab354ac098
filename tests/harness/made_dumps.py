"""Hand-written dumps of ranks, as `titan analyse` reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_debug.flight.diagnose import Analysis, analyse
from titan_debug.flight.dump import BACKGROUND, Dump, Dumps, Entry, Frame, Group, Thread

TORCH = "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
IN_COLLECTIVE = [Frame(TORCH, 4181, "all_reduce"), Frame("/home/me/train.py", 7, "step", "dist.all_reduce(x)")]
ASLEEP = [Frame("/home/me/hooks.py", 12, "titan_step_start", "time.sleep(60)")]


def entry(
    seq: int,
    done: bool = True,
    op: str = "all_reduce",
    group: str = "0",
    size: Sequence[int] = (4,),
    dtype: str = "Float",
    backend: str = "gloo",
) -> Entry:
    sizes, state = [list(size)], "completed" if done and backend == "nccl" else "scheduled"
    return Entry(group, backend, op, seq, False, done, state, 100.0 + seq, sizes, [dtype], sizes, [dtype], 300.0, 0)


def dump(
    rank: int,
    entries: list[Entry],
    *,
    world_size: int = 2,
    groups: dict[str, Sequence[int]] | None = None,
    stack: list[Frame] = IN_COLLECTIVE,
    **more: object,
) -> Dump:
    named = {"0": range(world_size), **(groups or {})}
    made = Dump(
        rank=rank,
        world_size=world_size,
        attempt=1000.0,
        host="node",
        pid=1,
        time=2000.0,
        why="step 3 takes longer than 2 s",
        step=3,
        in_step=True,
        coordinates={},
        groups=[Group(name, "all ranks" if name == "0" else name, tuple(ranks)) for name, ranks in named.items()],
        entries=entries,
        threads=[Thread("MainThread", True, 1)],
        stacks=[IN_COLLECTIVE, stack],
    )
    return replace(made, **more)  # type: ignore[arg-type]


def verdict(*dumps: Dump) -> Analysis:
    return analyse(Dumps(Path(), list(dumps)))


MESH: dict[str, Sequence[int]] = {"tp01": (0, 1), "tp23": (2, 3), "dp02": (0, 2), "dp13": (1, 3)}


def of_mesh(rank: int, entries: list[Entry], **more: Any) -> Dump:
    own = {name: ranks for name, ranks in MESH.items() if rank in ranks}
    return dump(rank, entries, world_size=4, groups=own, **more)


WITH_BACKGROUND: dict[str, Sequence[int]] = {BACKGROUND: (0, 1)}
ITEM = [Frame("/home/me/train.py", 80, "step", "loss.item()")]
"""A stack that waits for a GPU outside torch.distributed."""
