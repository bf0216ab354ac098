"""State of a run that is not a tensor: step, schedule, optimizer, position in the data, random generators. Plain values,
for the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from titan_ckpt.config import CheckpointSection
from titan_ckpt.contents import rng
from titan_ckpt.contents.optimizer_state import OptimizerState, state_of_all
from titan_ckpt.contents.plain_values import Unsaveable, damaged, require_same_type
from titan_ckpt.contents.schedule_state import restore_schedule, schedule_state
from titan_core.api import CheckpointContext
from titan_core.toolkit.plain_json import survives_json


def collect(context: CheckpointContext[CheckpointSection], optimizer: OptimizerState) -> dict[str, Any]:
    """Return the state of all ranks. Collective.

    Args:
        optimizer: state of this rank's optimizer.

    Raises:
        Unsaveable: a value cannot be represented in JSON, or differs between ranks.
        ValueError: the state of an observer cannot be represented in JSON.
    """
    state, world = context.state, context.world
    loader = state.loader.state_dict()
    by_rank: list[Any] = world.gather((loader["shards"], rng.collect(world.device)))
    shards = {name: position for owned, _ in by_rank for name, position in owned.items()}
    for key, value in (("stream_of", loader["stream_of"]), ("position", shards)):
        if not survives_json(value):
            raise Unsaveable(f"the data loader's {key}", "is not made of JSON values with strings as keys")
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
    """Restore the run from the result of :func:`collect`, on any mesh. The optimizer must be restored already.

    Args:
        allowed: patterns of changes that the config allows.
        new_schedule: whether to recompute the learning rates by the current config.

    Raises:
        UserError: the saved position is in another stream of data.
        ValueError: ``saved`` is not a result of :func:`collect`.
    """
    state, world = context.state, context.world
    state.loader.load_state_dict(saved["loader"], allowed)
    with damaged("the learning-rate schedule"):
        restore_schedule(state.lr_scheduler, saved["lr_scheduler"], new_schedule)
    state.step = saved["step"]
    state.tokens_seen = saved["tokens_seen"]
    state.tokens_by_dataset = dict(saved["tokens_by_dataset"])
    if saved["mesh"] == dict(world.plan.degrees):
        if len(saved["generators"]) != world.size:
            raise ValueError(f"it has the random generators of {len(saved['generators'])} ranks, expected {world.size}")
        rng.apply(saved["generators"][dist.get_rank()], world.device)
    for name, present in context.lifecycle.save_state().items():
        require_same_type(saved["observers"].get(name), present, f"the state of the observer {name!r}")
    context.lifecycle.restore_state(saved["observers"])
