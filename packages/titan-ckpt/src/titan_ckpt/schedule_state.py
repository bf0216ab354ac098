"""What a learning rate schedule keeps, without what it keeps for each parameter group: ranks may have different groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from titan_ckpt.plain_values import Unsaveable, decode, encode, require_alike
from titan_ckpt.torch_private import GROUP_KEYS, INNER_SCHEDULES, read_rates_from_groups
from titan_core.api.world import World

NAME = "lr_scheduler"


def schedule_state(scheduler: LRScheduler, world: World) -> dict[str, Any]:
    """Everything that ``scheduler`` keeps, as JSON. To be called by all ranks.

    Raises:
        Unsaveable: JSON cannot say it, or it differs between ranks.
    """
    state: dict[str, Any] = encode(_without_groups(scheduler.state_dict(), NAME), NAME)
    for other in world.gather(state):
        for key in state:
            if other.get(key) != state[key]:
                raise Unsaveable(f"{NAME}.{key}", "is not the same on all ranks, and belongs to this mesh")
    return state


def restore_schedule(scheduler: LRScheduler, saved: Mapping[str, Any], recompute: bool) -> None:
    """Bring ``scheduler`` to what :func:`schedule_state` returned; the groups have their saved rates already.

    Args:
        recompute: whether the rates are to be those of the schedule as it is configured now, where it computes them from the
            step alone.

    Raises:
        ValueError: ``saved`` is nothing that :func:`schedule_state` returns.
    """
    present, kept = scheduler.state_dict(), decode(dict(saved))
    for key in present.keys() & kept.keys():
        require_alike(kept[key], present[key], f"{NAME}.{key}")
    scheduler.load_state_dict(_merged(present, kept))
    if recompute and isinstance(scheduler, LambdaLR):
        scheduler.last_epoch -= 1
        scheduler.step()
    else:
        read_rates_from_groups(scheduler)


def _without_groups(state: Mapping[str, Any], name: str) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in state.items():
        if key == "lr_lambdas" and any(value):
            raise Unsaveable(f"{name}.{key}", "has state of its own: keep it in the scheduler, or in the groups")
        if key in GROUP_KEYS:
            continue
        if key == INNER_SCHEDULES:
            value = [_without_groups(one, f"{name}.{key}.{number}") for number, one in enumerate(value)]
        kept[key] = value
    return kept


def _merged(present: dict[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """``saved``, with what :func:`_without_groups` left out as it is at present."""
    merged = {**present, **saved}
    inner, kept = present.get(INNER_SCHEDULES), saved.get(INNER_SCHEDULES)
    if inner and kept:
        if len(inner) != len(kept):
            raise ValueError(f"it has {len(inner)} schedules here, and {len(kept)} there")
        merged[INNER_SCHEDULES] = [_merged(one, other) for one, other in zip(inner, kept, strict=True)]
    return merged
