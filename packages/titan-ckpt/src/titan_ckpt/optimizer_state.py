"""Everything that an optimizer keeps, by the names of the parameters that it keeps it for, so that it holds on any mesh.

Tensors are called ``optimizer.<parameter>.<key>``, with further keys where the state is nested; they are saved as the
model's are. All else is JSON: values of a parameter's state, the values of its group, and what the optimizer keeps for no
parameter.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from titan_ckpt.plain_values import Unsaveable, encode
from titan_ckpt.replicas import digests_of
from titan_ckpt.stored import OPTIMIZER
from titan_ckpt.tensors import replica_prefix, require_saveable
from titan_core.api.model_part import ModelPart
from titan_core.api.world import World

OWN = f"{OPTIMIZER}.<own>"
"""Begins the names of what is kept for no parameter."""
_NAMES = ("params", "param_names")
"""Which parameters a group has; they stand in ``group_of``."""


@dataclass
class OptimizerState:
    """What one rank's optimizer keeps."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    """By parameter, its state; ``{"$stored": name, ...}`` stands for a tensor."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """Each group's values: as they are ``now``, and as the config ``built`` them."""
    group_of: dict[str, int] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    """``state``: of no parameter; ``extra``: further keys of its ``state_dict``."""
    replicas: dict[str, Tensor] = field(default_factory=dict)
    """The tensors of which each rank has one, while their parameter is divided: they must be the same everywhere."""


def state_of(names: dict[nn.Parameter, str], optimizer: Optimizer, built: Sequence[dict[str, Any]]) -> OptimizerState:
    """What ``optimizer`` keeps on this rank.

    Args:
        names: of its parameters (:func:`parameter_names`).
        built: :func:`group_values` before the first step.

    Raises:
        Unsaveable: something of it cannot be saved.
    """
    found = OptimizerState()
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise Unsaveable("the optimizer", "has a parameter that the model has not")
            name = names[parameter]
            found.group_of[name] = number
            state = optimizer.state.get(parameter, {})
            found.parameters[name] = encode(dict(state), f"{OPTIMIZER}.{name}", _Keep(found, parameter))
    found.groups = [{"built": before, "now": now} for before, now in zip(built, group_values(optimizer), strict=True)]
    of_none = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    extra = {key: value for key, value in optimizer.state_dict().items() if key not in ("state", "param_groups")}
    found.own = encode({"state": of_none, "extra": extra}, OWN, _Keep(found, None))
    return found


def parameter_names(parts: Sequence[ModelPart]) -> dict[nn.Parameter, str]:
    """The name of each parameter of this rank."""
    return {parameter: name for part in parts for name, parameter in part.module.named_parameters()}


def group_values(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The values of each group as JSON.

    Raises:
        Unsaveable: JSON cannot say one.
    """
    return [
        {key: encode(value, f"{OPTIMIZER}.groups.{key}") for key, value in group.items() if key not in _NAMES}
        for group in optimizer.param_groups
    ]


def state_of_all(mine: OptimizerState, world: World) -> dict[str, Any]:
    """What the optimizers of all ranks keep beside tensors, for the manifest. To be called by all.

    Raises:
        Unsaveable: ranks that share a parameter keep different values for it.
    """
    plain: dict[str, Any] = {
        "parameters": mine.parameters,
        "groups": mine.groups,
        "group_of": mine.group_of,
        "own": mine.own,
    }
    if world.size == 1:
        return plain
    replicas = digests_of(mine.replicas)
    text = json.dumps([plain, replicas], sort_keys=True)
    if len(set(world.gather(hashlib.sha256(text.encode()).hexdigest()))) == 1:
        return plain  # as it is unless a pipeline gives ranks other parameters: nothing long is sent
    together: dict[str, Any] = {"parameters": {}, "groups": [], "group_of": {}, "own": mine.own}
    values: dict[str, Any] = {}
    # Copies of the weights that train apart have tensors of their own, which are saved by copy.
    for other, of_other in world.gather((plain, {replica_prefix(world) + name: one for name, one in replicas.items()})):
        _join(values, of_other, "")
        _join(together["parameters"], other["parameters"], f"{OPTIMIZER}.")
        _join({"": together["own"]}, {"": other["own"]}, OWN)
        numbers = []
        for group in other["groups"]:
            if group not in together["groups"]:
                together["groups"].append(group)
            numbers.append(together["groups"].index(group))
        _join(together["group_of"], {name: numbers[old] for name, old in other["group_of"].items()}, "the group of ")
    return together


def _join(all_of_them: dict[str, Any], more: dict[str, Any], prefix: str) -> None:
    for name, value in more.items():
        if all_of_them.setdefault(name, value) != value:
            why = "is not the same on all ranks that have it, and belongs to this mesh: keep it as a DTensor"
            raise Unsaveable(f"{prefix}{name}", why)


@dataclass(frozen=True)
class _Keep:
    """Puts tensors aside, and says what stands for them among plain values."""

    into: OptimizerState
    parameter: nn.Parameter | None

    def __call__(self, tensor: Tensor, name: str) -> dict[str, Any]:
        if name in self.into.tensors:
            raise Unsaveable(name, "is the name of two tensors")
        require_saveable(tensor, name)
        owner = self.parameter
        like = (
            owner is not None and tensor.shape == owner.shape and isinstance(tensor, DTensor) == isinstance(owner, DTensor)
        )
        if not isinstance(tensor, DTensor) and not like:
            self.into.replicas[name] = tensor.detach()
        self.into.tensors[name] = tensor.detach()
        host = owner is not None and tensor.device.type == "cpu" != owner.device.type
        return {"$stored": name, "like": like, "divided": isinstance(tensor, DTensor), "host": host}
