"""Bringing an optimizer to what a checkpoint kept of it (:mod:`titan_ckpt.optimizer_state`), on this mesh or on another."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from titan_ckpt.optimizer_state import group_values, parameter_names, state_of
from titan_ckpt.plain_values import decode, require_alike
from titan_ckpt.stored import OPTIMIZER, StoredTensor, tensors_in
from titan_core.api.model_part import ModelPart
from titan_core.api.tools.patterns import matches

_OF_SCHEDULE = ("lr",)
"""What a schedule sets in a group at each step: no part of what the config built."""


@dataclass
class OptimizerPlan:
    """What is to be loaded into an optimizer."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Where to load each tensor, by its name."""
    states: dict[nn.Parameter, dict[str, Any]] = field(default_factory=dict)
    """The state of each parameter, made of these tensors."""
    own: dict[str, Any] = field(default_factory=dict)
    excluded: set[str] = field(default_factory=set)
    """Parameters whose state starts over."""
    problems: list[str] = field(default_factory=list)
    """What cannot be loaded, and why."""


def begin_optimizer(optimizer: Optimizer) -> None:
    """Let the optimizer make its state, as the first step would, without a change to any weight or to a group's values."""
    if optimizer.state:
        return
    before = [
        {key: value if key == "lr" else copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, values in zip(optimizer.param_groups, before, strict=True):
        for key in group.keys() - values.keys() - {"params"}:
            del group[key]
        group.update(values)


def plan_restore(
    parts: Sequence[ModelPart],
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    excluded: Collection[str],
    same_mesh: bool,
) -> OptimizerPlan:
    """Decide where everything of ``saved`` goes. The optimizer must have a state (:func:`begin_optimizer`).

    Args:
        saved: :func:`~titan_ckpt.optimizer_state.state_of_all`.
        stored: the checkpoint's tensors.
        excluded: patterns of what not to load.
        same_mesh: whether it was saved on the mesh that there is now.

    Raises:
        Unsaveable: the optimizer keeps what it could not save either.
    """
    plan = OptimizerPlan()
    names = parameter_names(parts)
    begun = state_of(names, optimizer, group_values(optimizer)).tensors
    for parameter in _trained(optimizer):
        name = names[parameter]
        if name not in saved["parameters"]:
            if _is_excluded(f"{OPTIMIZER}.{name}", [], excluded):
                plan.excluded.add(name)
            else:
                plan.problems.append(f"{OPTIMIZER}.{name} is not there")
            continue
        tree = saved["parameters"][name]
        if _is_excluded(f"{OPTIMIZER}.{name}", leaves_of(tree, f"{OPTIMIZER}.{name}"), excluded):
            plan.excluded.add(name)
            continue
        plan.states[parameter] = decode(tree, _Targets(plan, begun, stored, parameter, same_mesh))
    if not _is_excluded(OPTIMIZER, tensors_in(saved["own"]) or [f"{OPTIMIZER}.<own>"], excluded):
        plan.own = decode(saved["own"], _Targets(plan, begun, stored, None, same_mesh))
        missing = plan.own["extra"].keys() - optimizer.state_dict().keys()
        plan.problems += [
            f"{OPTIMIZER} state {name!r} is there, and this optimizer keeps none of that name" for name in missing
        ]
    return plan


def apply_restore(optimizer: Optimizer, plan: OptimizerPlan) -> None:
    """Give the optimizer its state, once the plan's tensors are loaded."""
    if plan.own.get("extra"):
        optimizer.load_state_dict({**optimizer.state_dict(), **plan.own["extra"]})
    optimizer.state.clear()
    optimizer.state.update({parameter: state for parameter, state in plan.states.items() if state})
    optimizer.state.update(plan.own.get("state", {}))


def restore_groups(
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    saved: Mapping[str, Any],
    built: Sequence[Mapping[str, Any]],
    excluded: Collection[str],
    accepts: Callable[[str], bool],
) -> list[str]:
    """Set the values of each group to those saved. A value that the config builds otherwise than it did then stays as it is
    built, if that is accepted.

    Args:
        names: of the parameters.
        built: the groups' values as the config builds them now.
        excluded: parameters whose group is not to be restored.
        accepts: whether another value of a key is.

    Returns:
        What differs and is not accepted; where there is something, not all groups are restored.
    """
    problems: list[str] = []
    for group, mine in zip(optimizer.param_groups, built, strict=True):
        wanted = [names[one] for one in group["params"] if names[one] not in excluded]
        sources = _unique(saved["groups"][saved["group_of"][name]] for name in wanted)
        for key in dict.fromkeys(key for source in sources for key in source["now"]):
            if key in _OF_SCHEDULE:
                continue
            before = _unique(source["built"].get(key) for source in sources)
            now = _unique(source["now"].get(key) for source in sources)
            if before == [mine.get(key)] and len(now) == 1:
                _set(group, key, decode(now[0]))
            elif not accepts(key):
                there = " and ".join(map(repr, before if before != [mine.get(key)] else now))
                problems.append(f"{OPTIMIZER}.groups.{key} of {wanted[0]} is {there} there and {mine.get(key)!r} here")
    return problems


def saved_rates(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], saved: Mapping[str, Any], excluded: Collection[str]
) -> None:
    """Set each group's learning rate to the saved one, in proportion if the config builds another."""
    for group in optimizer.param_groups:
        wanted = [names[one] for one in group["params"] if names[one] not in excluded]
        sources = _unique(saved["groups"][saved["group_of"][name]]["now"] for name in wanted)
        if len(sources) != 1:
            continue
        rate, first = decode(sources[0]["lr"]), decode(sources[0].get("initial_lr"))
        if first is not None and float(first) not in (0.0, float(group["initial_lr"])):
            rate = rate * (float(group["initial_lr"]) / float(first))
        _set(group, "lr", rate)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    require_alike(value, group.get(key), f"{OPTIMIZER}.groups.{key}")
    if isinstance(group.get(key), Tensor):
        group[key].copy_(value)  # a compiled step has this very tensor
    else:
        group[key] = value


@dataclass(frozen=True)
class _Targets:
    """Finds, or makes, the tensor that a saved one is loaded into."""

    plan: OptimizerPlan
    begun: Mapping[str, Tensor]
    stored: Mapping[str, StoredTensor]
    parameter: nn.Parameter | None
    same_mesh: bool

    def __call__(self, value: Mapping[str, Any]) -> Tensor:
        name = value["$stored"]
        if name not in self.stored:
            self.plan.problems.append(f"{name} is not there")
            return torch.empty(())
        shape, dtype = self.stored[name].shape, getattr(torch, self.stored[name].dtype)
        target = self._target(name, shape, dtype, value)
        self.plan.tensors[name] = target
        return target

    def _target(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, value: Mapping[str, Any]) -> Tensor:
        begun, owner = self.begun.get(name), self.parameter
        if begun is not None:
            if begun.shape != shape:
                self.plan.problems.append(f"{name} is {list(shape)} there and {list(begun.shape)} here")
            return begun if begun.dtype == dtype else torch.zeros_like(begun, dtype=dtype)
        # What this optimizer makes later than at its first step.
        if owner is not None and value.get("like"):
            if owner.shape != shape:
                self.plan.problems.append(f"{name} is {list(shape)} there and {list(owner.shape)} here")
            return torch.zeros_like(owner, dtype=dtype, requires_grad=False)
        if shape and (value["divided"] or not self.same_mesh):
            self.plan.problems.append(f"{name} is {list(shape)} there, and how it is divided on this mesh is not known")
        return torch.zeros(shape, dtype=dtype, device="cpu" if owner is None or value.get("host") else owner.device)


def _is_excluded(name: str, leaves: Iterable[str], excluded: Collection[str]) -> bool:
    return any(matches(one, excluded) for one in (name, *leaves))


def leaves_of(tree: Any, name: str) -> list[str]:
    """The names of a parameter's tensors and of its other values."""
    return [*tensors_in(tree), *(f"{name}.{key}" for key in tree)]


def _trained(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _unique(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found
