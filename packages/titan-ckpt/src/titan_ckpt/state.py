"""What of a run is no tensor: step, schedule, place in the data, random generators. Plain values, for the manifest."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist

from titan_ckpt import rng
from titan_core.train.checkpoint import CheckpointRequest

_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas")
"""What a schedule keeps for each parameter group. Ranks have different groups, and each makes its own from the config."""


def collect(request: CheckpointRequest) -> dict[str, Any]:
    """The state of all ranks; to be called by all.

    Raises:
        TypeError: a schedule or a dataset keeps something that JSON cannot say.
        ValueError: an observer does.
    """
    state, world = request.state, request.world
    loader = state.loader.state_dict()
    by_rank: list[Any] = world.gather((loader["shards"], rng.collect(world.device)))
    shards = {name: position for owned, _ in by_rank for name, position in owned.items()}
    schedule = {key: value for key, value in state.lr_scheduler.state_dict().items() if key not in _BY_GROUP}
    collected = {
        "step": state.step,
        "tokens_seen": state.tokens_seen,
        "tokens_by_dataset": state.tokens_by_dataset,
        "lr_scheduler": schedule,
        "loader": {"stream_of": loader["stream_of"], "shards": shards},
        "mesh": dict(world.plan.degrees),
        "generators": [generators for _, generators in by_rank],
        "observers": request.lifecycle.save_state(),
    }
    json.dumps(collected)
    return collected


def apply(saved: dict[str, Any], request: CheckpointRequest) -> None:
    """Go on from what :func:`collect` gave, on this mesh or on another.

    Raises:
        UserError: it is of another stream of data.
    """
    state, world = request.state, request.world
    state.step = saved["step"]
    state.tokens_seen = saved["tokens_seen"]
    state.tokens_by_dataset = dict(saved["tokens_by_dataset"])
    state.loader.load_state_dict(saved["loader"])
    scheduler = state.lr_scheduler
    scheduler.load_state_dict({**scheduler.state_dict(), **saved["lr_scheduler"]})
    # The rates of this rank's own groups at this step: those that a step from the one before would set.
    scheduler.last_epoch -= 1
    scheduler.step()
    if saved["mesh"] == dict(world.plan.degrees):
        rng.apply(saved["generators"][dist.get_rank()], world.device)
    request.lifecycle.restore_state(saved.get("observers", {}))  # first checkpoints had none
