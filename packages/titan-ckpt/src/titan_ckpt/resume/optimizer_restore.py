"""Restoring an optimizer from the state that :mod:`titan_ckpt.contents.optimizer_state` saved, on any mesh."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from titan_ckpt.contents.optimizer_state import group_values, parameter_names, state_of
from titan_ckpt.contents.plain_values import decode, require_same_type
from titan_ckpt.format.stored import OPTIMIZER, StoredTensor, tensors_in
from titan_core.api import ModelPart, matches

_SCHEDULED = ("lr",)
"""Keys of a group that the learning-rate schedule sets at each step; :func:`restore_rates` restores them."""


@dataclass
class OptimizerPlan:
    """Tensors and values to load into an optimizer."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Tensor to load into, by name."""
    states: dict[nn.Parameter, dict[str, Any]] = field(default_factory=dict)
    """State of each parameter, which refers to the tensors above."""
    own: dict[str, Any] = field(default_factory=dict)
    """State that belongs to no parameter (:attr:`~titan_ckpt.contents.optimizer_state.OptimizerState.own`)."""
    excluded: set[str] = field(default_factory=set)
    """Names of parameters whose state is not restored."""
    fresh: set[str] = field(default_factory=set)
    """Those of them that were not trained before, and have no state in the checkpoint."""
    problems: list[str] = field(default_factory=list)
    """Reasons why the state cannot be loaded."""


def initialise_state(optimizer: Optimizer) -> None:
    """Make the optimizer create its state, as its first step would, without changing any weight or group value."""
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
    unfreezes: bool = False,
) -> OptimizerPlan:
    """Assign every saved value a place in the optimizer, whose state must exist already (:func:`initialise_state`).

    Args:
        saved: result of :func:`~titan_ckpt.contents.optimizer_state.state_of_all`.
        stored: tensors of the checkpoint.
        excluded: patterns of names not to load.
        same_mesh: whether the state was saved on the current mesh.
        unfreezes: whether parameters may be trained now that were not before: they start with fresh state.

    Raises:
        Unsaveable: the optimizer's present state could not be saved either.
    """
    plan = OptimizerPlan()
    names = parameter_names(parts)
    present = state_of(names, optimizer, group_values(optimizer)).tensors
    for parameter in _trained(optimizer):
        name = names[parameter]
        if name not in saved["parameters"]:
            if _is_excluded(f"{OPTIMIZER}.{name}", [], excluded):
                plan.excluded.add(name)
            elif unfreezes:
                plan.excluded.add(name)
                plan.fresh.add(name)
            else:
                plan.problems.append(f"{OPTIMIZER}.{name} is not in the checkpoint")
            continue
        tree = saved["parameters"][name]
        if _is_excluded(f"{OPTIMIZER}.{name}", leaves_of(tree, f"{OPTIMIZER}.{name}"), excluded):
            plan.excluded.add(name)
            continue
        plan.states[parameter] = decode(tree, _Targets(plan, present, stored, parameter, same_mesh))
    if not _is_excluded(OPTIMIZER, tensors_in(saved["own"]) or [f"{OPTIMIZER}.<own>"], excluded):
        plan.own = decode(saved["own"], _Targets(plan, present, stored, None, same_mesh))
        missing = plan.own["extra"].keys() - optimizer.state_dict().keys()
        plan.problems += [f"{OPTIMIZER} state {name!r} is in the checkpoint, but not in this optimizer" for name in missing]
    return plan


def apply_restore(optimizer: Optimizer, plan: OptimizerPlan) -> None:
    """Set the optimizer's state, after the plan's tensors were loaded."""
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
    """Set the values of each group to the saved ones. A value whose config changed since the save keeps its new value, if
    that change is accepted.

    Args:
        names: names of the parameters.
        built: values of the groups as built from the current config.
        excluded: names of parameters whose groups are not restored.
        accepts: whether a key may have another value than in the checkpoint.

    Returns:
        Differences that are not accepted. If there are any, the groups are restored only in part.
    """
    problems: list[str] = []
    for group, current in zip(optimizer.param_groups, built, strict=True):
        wanted = [names[parameter] for parameter in group["params"] if names[parameter] not in excluded]
        sources = _unique(saved["groups"][saved["group_of"][name]] for name in wanted)
        for key in dict.fromkeys(key for source in sources for key in source["now"]):
            if key in _SCHEDULED:
                continue
            before = _unique(source["built"].get(key) for source in sources)
            now = _unique(source["now"].get(key) for source in sources)
            if before == [current.get(key)] and len(now) == 1:
                _set(group, key, decode(now[0]))
            elif not accepts(key):
                values = " and ".join(map(repr, before if before != [current.get(key)] else now))
                where = f"{OPTIMIZER}.groups.{key} of {wanted[0]}"
                problems.append(f"{where} is {values} in the checkpoint and {current.get(key)!r} in this job")
    return problems


def restore_rates(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], saved: Mapping[str, Any], excluded: Collection[str]
) -> None:
    """Set each group's learning rate to the saved one, scaled if the config's initial learning rate changed. A group without
    restored parameters gets the rate of the others, in proportion: a schedule has one factor for all."""
    others = [group["now"] for group in saved["groups"] if decode(group["now"].get("initial_lr"))]
    for group in optimizer.param_groups:
        wanted = [names[parameter] for parameter in group["params"] if names[parameter] not in excluded]
        sources = _unique(saved["groups"][saved["group_of"][name]]["now"] for name in wanted) if wanted else others[:1]
        if len(sources) != 1:
            continue
        rate, first = decode(sources[0]["lr"]), decode(sources[0].get("initial_lr"))
        if first is not None and float(first) not in (0.0, float(group["initial_lr"])):
            rate = rate * (float(group["initial_lr"]) / float(first))
        _set(group, "lr", rate)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    require_same_type(value, group.get(key), f"{OPTIMIZER}.groups.{key}")
    if isinstance(group.get(key), Tensor):
        group[key].copy_(value)  # in place: a compiled step refers to this tensor object
    else:
        group[key] = value


@dataclass(frozen=True)
class _Targets:
    """Returns the tensor to load a saved tensor into, and creates it if necessary."""

    plan: OptimizerPlan
    present: Mapping[str, Tensor]
    stored: Mapping[str, StoredTensor]
    parameter: nn.Parameter | None
    same_mesh: bool

    def __call__(self, value: Mapping[str, Any]) -> Tensor:
        name = value["$stored"]
        if name not in self.stored:
            self.plan.problems.append(f"{name} is not in the checkpoint")
            return torch.empty(())
        shape, dtype = self.stored[name].shape, getattr(torch, self.stored[name].dtype)
        target = self._target(name, shape, dtype, value)
        self.plan.tensors[name] = target
        return target

    def _target(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, value: Mapping[str, Any]) -> Tensor:
        present, owner = self.present.get(name), self.parameter
        if present is not None:
            if present.shape != shape:
                self.plan.problems.append(_other_shape(name, shape, present.shape))
            return present if present.dtype == dtype else torch.zeros_like(present, dtype=dtype)
        # A tensor that this optimizer creates only after its first step.
        if owner is not None and value.get("like"):
            if owner.shape != shape:
                self.plan.problems.append(_other_shape(name, shape, owner.shape))
            return torch.zeros_like(owner, dtype=dtype, requires_grad=False)
        if shape and (value["divided"] or not self.same_mesh):
            self.plan.problems.append(f"{name} has shape {list(shape)} and an unknown sharding on this mesh")
        return torch.zeros(shape, dtype=dtype, device="cpu" if owner is None or value.get("host") else owner.device)


def _other_shape(name: str, saved: Sequence[int], present: Sequence[int]) -> str:
    return f"{name} has shape {list(saved)} in the checkpoint and {list(present)} in this job"


def _is_excluded(name: str, leaves: Iterable[str], excluded: Collection[str]) -> bool:
    return any(matches(candidate, excluded) for candidate in (name, *leaves))


def leaves_of(tree: Any, name: str) -> list[str]:
    """Return the names of the tensors and of the other values in a parameter's state."""
    return [*tensors_in(tree), *(f"{name}.{key}" for key in tree)]


def _trained(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _unique(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found
