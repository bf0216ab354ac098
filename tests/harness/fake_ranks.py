"""Rank 0 of a world whose other ranks do not exist: collectives return at once, with meaningless results.

For tests of what a rank calls, not of what it computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan_core.api import JobMesh, ModelPart
from titan_core.model.build import build_parts
from titan_core.torch_private import forget_meshes
from titan_testing.jobs import make_job


@contextmanager
def fake_ranks(size: int) -> Iterator[None]:
    """Join a world of ``size`` ranks as its rank 0."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


def build_on_fake_ranks(overrides: dict[str, object]) -> tuple[ModelPart, JobMesh, Any]:
    """Return rank 0's part of recipe ``tiny``, its mesh and its job, on all ranks of the world."""
    job = make_job("tiny", {**overrides, "job.device": "cpu"}, dist.get_world_size())
    mesh = JobMesh(job.mesh, "cpu")
    (part,) = build_parts(job, mesh, torch.device("cpu"))
    return part, mesh, job


class Operators(TorchDispatchMode):
    """Counts collectives, by name, operators on DTensors, and all others."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.on_dtensors: Counter[str] = Counter()
        self.others: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        namespace, _, name = function._schema.name.partition("::")
        if "c10d" in namespace and name != "wait_tensor":
            self.collectives[name] += 1
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves((arguments, keywords))):
            self.on_dtensors[name] += 1
        elif "c10d" not in namespace:
            self.others[name] += 1
        return function(*arguments, **(keywords or {}))
