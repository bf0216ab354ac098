"""State of a run that is not a tensor: step, schedule, optimizer, position in the data, random generators. Plain values,
for the manifest.

Titan's own random values come from counters, so few jobs ever draw from the generators. The state of one that has only been
seeded is its seed, and ranks with the same state share one entry: with thousands of ranks, whole states (11 KiB each) would
be most of a manifest.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from titan_ckpt.config import CheckpointSection
from titan_ckpt.contents.optimizer_state import OptimizerState, state_of_all
from titan_ckpt.contents.plain_values import Unsaveable, damaged, decode, encode, require_same_type
from titan_ckpt.torch_private import GROUP_KEYS, INNER_SCHEDULES, read_rates_from_groups
from titan_core.api import CheckpointContext, World
from titan_core.api.parallel.tree import gather_on_first
from titan_core.toolkit.plain_json import survives_json

NAME = "lr_scheduler"


def collect(context: CheckpointContext[CheckpointSection], optimizer: OptimizerState) -> dict[str, Any]:
    """Return the state of all ranks; the position in the data and the random generators on the first rank only, which
    writes the manifest. Collective.

    Args:
        optimizer: state of this rank's optimizer.

    Raises:
        Unsaveable: a value cannot be represented in JSON, or differs between ranks.
        ValueError: the state of an observer cannot be represented in JSON.
    """
    state, world = context.state, context.world
    loader = state.loader.state_dict()
    parts = {"stream_of": loader["stream_of"], "position": loader["shards"]}
    wrong = next((name for name, value in parts.items() if not survives_json(value)), "")
    if name := next(filter(None, world.gather(wrong)), ""):
        raise Unsaveable(f"the data loader's {name}", "is not made of JSON values with strings as keys")
    shards = {name: position for owned, _ in gather_on_first(loader["shards"]) for name, position in owned.items()}
    generators = gather_on_first(generator_states(world))
    return {
        "step": state.step,
        "tokens_seen": state.tokens_seen,
        "tokens_by_dataset": state.tokens_by_dataset,
        "lr_scheduler": schedule_state(state.lr_scheduler, world),
        "optimizer": state_of_all(optimizer, world),
        "loader": {"stream_of": loader["stream_of"], "shards": shards},
        "mesh": dict(world.plan.degrees),
        "generators": [{**states, "ranks": list(chain(*spans))} for states, spans in generators],
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
        own = [states for states in saved["generators"] if _has(states["ranks"], world.rank)]
        if len(own) != 1:
            raise ValueError(f"it has {len(own)} states of the random generators of rank {world.rank}, expected one")
        restore_generators(own[0], world)
    for name, present in context.lifecycle.save_state().items():
        require_same_type(saved["observers"].get(name), present, f"the state of the observer {name!r}")
    context.lifecycle.restore_state(saved["observers"])


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


def generator_states(world: World) -> dict[str, Any]:
    """Return the states of Python's generator, of torch's CPU generator, and of torch's generator on the device if CUDA.

    A seed is relative to :attr:`World.data_rank <titan_core.api.World.data_rank>`, as a run's seeds are
    (``prepare_numerics``): so it is the same on all ranks.
    """
    seed = torch.initial_seed()
    cpu, python = torch.get_rng_state(), random.getstate()
    version, words, gauss = python
    own = seed - world.data_rank
    states: dict[str, Any] = {
        "python": own if random.Random(seed).getstate() == python else [version, list(words), gauss],
        "cpu": own if torch.equal(torch.Generator().manual_seed(seed).get_state(), cpu) else _text_of(cpu),
    }
    if world.device.type == "cuda":
        states["cuda"] = _text_of(torch.cuda.get_rng_state(world.device))
    return states


def _has(spans: Sequence[int], rank: int) -> bool:
    return any(start <= rank < stop for start, stop in zip(spans[::2], spans[1::2], strict=True))


def restore_generators(states: dict[str, Any], world: World) -> None:
    """Set the generators to ``states``, a result of :func:`generator_states`.

    Raises:
        ValueError: ``states`` is not a result of :func:`generator_states`.
    """
    try:
        python, cpu = states["python"], states["cpu"]
        if isinstance(python, int):
            random.seed(python + world.data_rank)
        else:
            version, words, gauss = python
            if not all(type(word) is int for word in words) or type(gauss) not in (float, type(None)):
                raise TypeError("the state of Python's generator is not made of numbers")
            random.setstate((version, tuple(words), gauss))
        if isinstance(cpu, int):
            torch.default_generator.manual_seed(cpu + world.data_rank)
        else:
            torch.set_rng_state(_tensor_of(cpu))
        if world.device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(_tensor_of(states["cuda"]), world.device)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"the state of a random generator is damaged: {error}") from None


def _text_of(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor_of(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
