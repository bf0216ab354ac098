"""State of a learning-rate schedule, without its values per parameter group: ranks may have different groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from titan_ckpt.contents.plain_values import Unsaveable, decode, encode, require_same_type
from titan_ckpt.torch_private import GROUP_KEYS, INNER_SCHEDULES, read_rates_from_groups
from titan_core.api import World

NAME = "lr_scheduler"


def schedule_state(scheduler: LRScheduler, world: World) -> dict[str, Any]:
    """Return the state of ``scheduler`` as JSON. Collective.

    Raises:
        Unsaveable: a value cannot be represented in JSON, or differs between ranks.
    """
    state: dict[str, Any] = encode(_without_groups(scheduler.state_dict(), NAME), NAME)
    for other in world.gather(state):
        for key in state:
            if other.get(key) != state[key]:
                raise Unsaveable(f"{NAME}.{key}", "differs between ranks")
    return state


def restore_schedule(scheduler: LRScheduler, saved: Mapping[str, Any], recompute: bool) -> None:
    """Restore ``scheduler`` from the result of :func:`schedule_state`. The groups' learning rates must be restored already.

    Args:
        recompute: whether to recompute the rates by the current config, if the schedule computes them from the step alone.

    Raises:
        ValueError: ``saved`` is not a result of :func:`schedule_state`.
    """
    present, kept = scheduler.state_dict(), decode(dict(saved))
    for key in present.keys() & kept.keys():
        require_same_type(kept[key], present[key], f"{NAME}.{key}")
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
            raise Unsaveable(f"{name}.{key}", "contains a callable with state")
        if key in GROUP_KEYS:
            continue
        if key == INNER_SCHEDULES:
            value = [_without_groups(schedule, f"{name}.{key}.{number}") for number, schedule in enumerate(value)]
        kept[key] = value
    return kept


def _merged(present: dict[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``saved``, with the entries that :func:`_without_groups` omits taken from ``present``."""
    merged = {**present, **saved}
    inner, kept = present.get(INNER_SCHEDULES), saved.get(INNER_SCHEDULES)
    if inner and kept:
        if len(inner) != len(kept):
            raise ValueError(f"the job has {len(inner)} schedules, the checkpoint {len(kept)}")
        merged[INNER_SCHEDULES] = [_merged(*schedules) for schedules in zip(inner, kept, strict=True)]
    return merged
