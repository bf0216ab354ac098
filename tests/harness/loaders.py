"""Loaders of the letters dataset for one rank or for all ranks."""

from __future__ import annotations

import itertools
import json
from typing import Any

from harness.letters import BYTE, letters, stream
from titan_core.api import BatchPlan
from titan_core.api.data.dataset import StreamSpec
from titan_core.data.loader import DataLoader
from titan_core.data.streams import open_sources

LENGTHS = ",".join(str(1 + index * 7 % 23) for index in range(100))
MIXED = (letters(LENGTHS, weight=3.0), letters(LENGTHS, "digits", weight=1.0))


def plan(ranks: int, microbatches: int = 1, global_size: int = 8, shards: int = 8, seq_len: int = 7) -> BatchPlan:
    return BatchPlan(global_size, global_size // ranks // microbatches, microbatches, ranks, shards, seq_len)


def loaders_of(spec: StreamSpec, **options: Any) -> list[DataLoader]:
    return [DataLoader(spec, open_sources(spec), BYTE, rank, **options) for rank in range(spec.plan.ranks)]


def loaders(ranks: int, microbatches: int = 1, workers: int = 0, on_end: str = "repeat", **shape: Any) -> list[DataLoader]:
    spec = stream(letters(LENGTHS), plan=plan(ranks, microbatches, **shape), on_end=on_end)
    return loaders_of(spec, workers=workers)


def close(*groups: list[DataLoader]) -> None:
    for loader in itertools.chain(*groups):
        loader.close()


def merged(loaders: list[DataLoader]) -> dict[str, Any]:
    """Return the positions of all ranks merged into one state of plain values, as a checkpoint stores them."""
    states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
    return {**states[0], "shards": {key: value for state in states for key, value in state["shards"].items()}}


def global_batch(loaders: list[DataLoader]) -> list[list[int]] | None:
    """Return the sequences of the next step over all ranks; ``None`` if the data has ended."""
    steps = [loader.next_step() for loader in loaders]
    if any(step is None for step in steps):
        return None
    return [row for step in steps if step for batch in step.microbatches for row in batch.tokens.tolist()]
