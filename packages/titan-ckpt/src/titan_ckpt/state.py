"""What of a run is no tensor: step, schedule, optimizer, place in the data, random generators. Plain values, for the
manifest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from titan_ckpt import rng
from titan_ckpt.config import CheckpointSection
from titan_ckpt.optimizer_state import OptimizerState, state_of_all
from titan_ckpt.plain_values import Unsaveable, damaged, require_alike
from titan_ckpt.schedule_state import restore_schedule, schedule_state
from titan_core.api.checkpoint import CheckpointContext
from titan_core.api.tools.plain_json import survives_json


def collect(context: CheckpointContext[CheckpointSection], optimizer: OptimizerState) -> dict[str, Any]:
    """The state of all ranks; to be called by all.

    Args:
        optimizer: this rank's.

    Raises:
        Unsaveable: something cannot be kept as JSON, or belongs to a rank.
        ValueError: an observer keeps what JSON cannot say.
    """
    state, world = context.state, context.world
    loader = state.loader.state_dict()
    by_rank: list[Any] = world.gather((loader["shards"], rng.collect(world.device)))
    shards = {name: position for owned, _ in by_rank for name, position in owned.items()}
    for key, value in (("stream_of", loader["stream_of"]), ("position", shards)):
        if not survives_json(value):
            raise Unsaveable(f"the data's {key}", "is not made of JSON's values, with texts as keys")
    return {
        "step": state.step,
        "tokens_seen": state.tokens_seen,
        "tokens_by_dataset": state.tokens_by_dataset,
        "lr_scheduler": schedule_state(state.lr_scheduler, world),
        "optimizer": state_of_all(optimizer, world),
        "loader": {"stream_of": loader["stream_of"], "shards": shards},
        "mesh": dict(world.plan.degrees),
        "generators": [generators for _, generators in by_rank],
        "observers": context.lifecycle.save_state(),
    }


def apply(
    saved: dict[str, Any], context: CheckpointContext[CheckpointSection], allowed: Sequence[str], new_schedule: bool
) -> None:
    """Bring the run to what :func:`collect` returned, on this mesh or on another. The optimizer is restored already.

    Args:
        allowed: patterns of changes that the config allows.
        new_schedule: whether the learning rates are to be those of the config.

    Raises:
        UserError: it is of another stream of data.
        ValueError: it is nothing that :func:`collect` returns.
    """
    state, world = context.state, context.world
    state.loader.load_state_dict(saved["loader"], allowed)
    with damaged("the schedule's"):
        restore_schedule(state.lr_scheduler, saved["lr_scheduler"], new_schedule)
    state.step = saved["step"]
    state.tokens_seen = saved["tokens_seen"]
    state.tokens_by_dataset = dict(saved["tokens_by_dataset"])
    if saved["mesh"] == dict(world.plan.degrees):
        if len(saved["generators"]) != world.size:
            raise ValueError(f"it has random generators of {len(saved['generators'])} ranks, not of {world.size}")
        rng.apply(saved["generators"][dist.get_rank()], world.device)
    for name, present in context.lifecycle.save_state().items():
        require_alike(saved["observers"].get(name), present, f"the state of the observer {name!r}")
    context.lifecycle.restore_state(saved["observers"])
