"""The complete state of an optimizer, by the names of parameters, so that it applies to any mesh.

Tensors are called ``optimizer.<parameter>.<key>``, with further keys if the state is nested, and are saved like the model's.
Everything else is JSON: other values in a parameter's state, the values of its group, and state that belongs to no
parameter.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from titan_ckpt.config import CheckpointSection
from titan_ckpt.contents.plain_values import Unsaveable, encode
from titan_ckpt.contents.tensors import digests_of, replica_prefix, require_saveable
from titan_ckpt.format.stored import OPTIMIZER
from titan_core.api import CheckpointContext, ModelPart, OptimizerSection, ParameterRole, ParamGroup, TrainedParameter, World
from titan_core.api.training.optimizer import param_groups, trained_parameters

OWN = f"{OPTIMIZER}.<own>"
"""Prefix of the names of state that belongs to no parameter."""
_NAMES = ("params", "param_names")
"""Keys of a group that list its parameters, which are saved as ``group_of`` instead."""


@dataclass
class OptimizerState:
    """State of one rank's optimizer."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    """State by parameter. ``{"$stored": name, ...}`` represents a tensor."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """Values of each group: the current ones (``now``) and those built from the config (``built``)."""
    group_of: dict[str, int] = field(default_factory=dict)
    """Index of each parameter's group."""
    own: dict[str, Any] = field(default_factory=dict)
    """``state``: state that belongs to no parameter; ``extra``: further keys of the optimizer's ``state_dict``."""
    replicas: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that are replicated although their parameter is sharded. They must be equal on all ranks."""


def state_of(names: dict[nn.Parameter, str], optimizer: Optimizer, built: Sequence[dict[str, Any]]) -> OptimizerState:
    """Return the state of ``optimizer`` on this rank.

    Args:
        names: result of :func:`parameter_names`.
        built: result of :func:`group_values` before the first step.

    Raises:
        Unsaveable: part of the state cannot be saved.
    """
    found = OptimizerState()
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise Unsaveable("the optimizer", "has a parameter that is not in the model")
            name = names[parameter]
            found.group_of[name] = number
            state = optimizer.state.get(parameter, {})
            found.parameters[name] = encode(dict(state), f"{OPTIMIZER}.{name}", _CollectTensors(found, parameter))
    found.groups = [{"built": before, "now": now} for before, now in zip(built, group_values(optimizer), strict=True)]
    of_none = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    extra = {key: value for key, value in optimizer.state_dict().items() if key not in ("state", "param_groups")}
    found.own = encode({"state": of_none, "extra": extra}, OWN, _CollectTensors(found, None))
    return found


def parameter_names(parts: Sequence[ModelPart]) -> dict[nn.Parameter, str]:
    """Return the name of each parameter on this rank."""
    return {parameter: name for part in parts for name, parameter in part.named_parameters()}


def group_values(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the values of each group as JSON.

    Raises:
        Unsaveable: a value cannot be represented in JSON.
    """
    return [
        {key: encode(value, f"{OPTIMIZER}.groups.{key}") for key, value in group.items() if key not in _NAMES}
        for group in optimizer.param_groups
    ]


def state_of_all(own_state: OptimizerState, world: World) -> dict[str, Any]:
    """Merge the state of the optimizers of all ranks, without the tensors, for the manifest. Collective.

    Raises:
        Unsaveable: ranks that share a parameter have different values for it.
    """
    plain: dict[str, Any] = {
        "parameters": own_state.parameters,
        "groups": own_state.groups,
        "group_of": own_state.group_of,
        "own": own_state.own,
    }
    if world.size == 1:
        return plain
    replicas = digests_of(own_state.replicas)
    text = json.dumps([plain, replicas], sort_keys=True)
    if len(set(world.gather(hashlib.sha256(text.encode()).hexdigest()))) == 1:
        return plain  # the usual case, unless pipeline stages hold different parameters; avoids gathering the state
    merged: dict[str, Any] = {"parameters": {}, "groups": [], "group_of": {}, "own": own_state.own}
    digests: dict[str, Any] = {}
    # Each diverging replica saves its own tensors, so only digests of the same replica must be equal.
    named = {replica_prefix(world) + name: digest for name, digest in replicas.items()}
    for other, other_digests in world.gather((plain, named)):
        _join(digests, other_digests, "")
        _join(merged["parameters"], other["parameters"], f"{OPTIMIZER}.")
        _join({"": merged["own"]}, {"": other["own"]}, OWN)
        numbers = []
        for group in other["groups"]:
            if group not in merged["groups"]:
                merged["groups"].append(group)
            numbers.append(merged["groups"].index(group))
        _join(merged["group_of"], {name: numbers[old] for name, old in other["group_of"].items()}, "the group of ")
    return merged


def _join(merged: dict[str, Any], more: dict[str, Any], prefix: str) -> None:
    for name, value in more.items():
        if merged.setdefault(name, value) != value:
            raise Unsaveable(f"{prefix}{name}", "differs between the ranks that have it")


@dataclass(frozen=True)
class _CollectTensors:
    """Collects the tensors within a state, and returns the JSON that represents each."""

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


def try_optimizer(context: CheckpointContext[CheckpointSection]) -> None:
    """Take one step with a second optimizer of the same kind, on copies of a few small parameters. The run's own optimizer
    is not used, because a step may have effects that cannot be undone.

    Raises:
        Unsaveable: the optimizer's state cannot be saved.
    """
    job, world = context.job, context.world
    section = job.config.section(OptimizerSection)
    groups: list[ParamGroup] = []
    copies: dict[nn.Parameter, str] = {}
    for group in param_groups(trained_parameters(context.state.parts), section):
        # The optimizer may keep different state for each role and number of dimensions.
        smallest: dict[tuple[ParameterRole, int], TrainedParameter] = {}
        for parameter in group.parameters:
            kind = parameter.role, parameter.tensor.dim()
            known = smallest.get(kind)
            if known is None or parameter.tensor.numel() < known.tensor.numel():
                smallest[kind] = parameter
        trial = [
            replace(parameter, tensor=nn.Parameter(parameter.tensor.detach().clone())) for parameter in smallest.values()
        ]
        copies |= {parameter.tensor: parameter.name for parameter in trial}
        groups.append(replace(group, parameters=trial))
    optimizer = job.optimizer.build.load()(job.optimizer.optimizer_context(job, world.mesh, world.device, groups))
    built = group_values(optimizer)
    for copy in copies:
        copy.grad = torch.full_like(copy, 1e-3)
    optimizer.step()
    state_of(copies, optimizer, built)
