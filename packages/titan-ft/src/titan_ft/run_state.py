"""The state of a run as one rank of a replica group has it, for the rank of the same number in a group that joins.

It consists of tensors and plain values, so that the receiver can load it without executing code of the sender.
"""

from __future__ import annotations

import io
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from titan_core.api import ModelPart, Run, UserError

_SHARD = "$shard"
"""Key of the dict that stands for a tensor that is sharded like its parameter."""


def collect(run: Run) -> dict[str, Any]:
    """Return the state after the last step. Its tensors are those of the training, not copies: the transport copies them
    before the training continues.

    Raises:
        UserError: part of the state cannot be sent.
    """
    state = run.state
    return {
        "tensors": {name: _local(tensor) for name, tensor in _tensors(run).items()},
        "optimizer": _optimizer_state(state.optimizer, _names(state.parts)),
        "lr_scheduler": state.lr_scheduler.state_dict(),
        "loader": state.loader.state_dict(),
        "step": state.step,
        "tokens_seen": state.tokens_seen,
        "tokens_by_dataset": dict(state.tokens_by_dataset),
        "origin": dict(state.origin),
        "observers": run.observers.save_state(),
        "generators": _generators(run.world.device),
    }


@torch.no_grad()
def apply(received: Mapping[str, Any], run: Run) -> None:
    """Replace the run's state by ``received``, a result of :func:`collect`, in place.

    Raises:
        UserError: the state is that of another stream of data.
        ValueError: the state does not fit this rank.
    """
    state, tensors = run.state, _tensors(run)
    if differing := tensors.keys() ^ received["tensors"].keys():
        raise ValueError(f"the state of the peer does not have the same tensors: {sorted(differing)[:3]}")
    for name, tensor in tensors.items():
        _local(tensor).copy_(received["tensors"][name])
    _load_optimizer(state.optimizer, _names(state.parts), received["optimizer"])
    state.lr_scheduler.load_state_dict(received["lr_scheduler"])
    state.loader.load_state_dict(received["loader"])
    state.step, state.tokens_seen = received["step"], received["tokens_seen"]
    state.tokens_by_dataset.clear()
    state.tokens_by_dataset.update(received["tokens_by_dataset"])
    state.origin = dict(received["origin"])
    run.observers.restore_state(received["observers"])
    _set_generators(received["generators"], run.world.device)


def require_sendable(state: Mapping[str, Any]) -> None:
    """Check that a group that joins could load ``state``, a result of :func:`collect`, long before one needs it.

    Raises:
        UserError: part of the state is neither a tensor nor a plain value.
    """
    for name, value in state.items():
        plain = _without_tensors(value)
        file = io.BytesIO()
        try:
            torch.save(plain, file)
            file.seek(0)
            torch.load(file, weights_only=True)
        except Exception:  # noqa: BLE001 - whatever the pickler or a reduction raises
            why = "is neither tensors nor plain values, so a replica group that joins could not load it"
            fix = "set fault_tolerance.enable = false, or use another plugin for it"
            raise UserError.one(f"the state of {name}", why, fix) from None


def _tensors(run: Run) -> dict[str, Tensor]:
    """Return the weights, the persistent buffers, and the tensors of observers."""
    found: dict[str, Tensor] = {}
    for part in run.state.parts:
        found |= {f"model.{name}": parameter.detach() for name, parameter in part.named_parameters()}
        found |= {f"model.{name}": buffer for name, buffer in persistent_buffers(part).items()}
    return found | {f"observers.{name}": tensor for name, tensor in run.observers.state_tensors().items()}


def persistent_buffers(part: ModelPart) -> dict[str, Tensor]:
    """Return the buffers of ``part`` that belong to its state."""
    kept = part.module.state_dict().keys()
    return {name: buffer for name, buffer in part.module.named_buffers() if name in kept}


def _names(parts: Sequence[ModelPart]) -> dict[nn.Parameter, str]:
    return {parameter: name for part in parts for name, parameter in part.named_parameters()}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _optimizer_state(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    foreign = [key for key in optimizer.state if key not in names]
    extra = sorted(optimizer.state_dict().keys() - {"state", "param_groups"})
    if foreign or extra:
        why = f"keeps state that belongs to no parameter ({', '.join(extra) or type(foreign[0]).__name__}), which fault "
        raise UserError.one("the optimizer", f"{why}tolerance cannot copy", "use another optimizer")
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    by_parameter: Mapping[Any, Any] = optimizer.state
    states = {names[parameter]: _encoded(dict(state), parameter) for parameter, state in by_parameter.items()}
    return {"groups": groups, "state": states}


def _load_optimizer(optimizer: Optimizer, names: Mapping[nn.Parameter, str], received: Mapping[str, Any]) -> None:
    # Not ``Optimizer.load_state_dict``, which casts the state to the type of its parameter.
    for group, values in zip(optimizer.param_groups, received["groups"], strict=True):
        group.update(values)
    by_name = {name: parameter for parameter, name in names.items()}
    optimizer.state.clear()
    for name, state in received["state"].items():
        optimizer.state[by_name[name]] = _decoded(state, by_name[name])


def _encoded(value: Any, parameter: Tensor) -> Any:
    if isinstance(value, DTensor):
        if not isinstance(parameter, DTensor) or _layout(value) != _layout(parameter):
            why = "keeps a tensor that is sharded in another way than its parameter, which fault tolerance cannot copy"
            raise UserError.one("the optimizer", why, "use another optimizer")
        return {_SHARD: value.to_local(), "device": value.device.type}
    if isinstance(value, Tensor):
        return {_SHARD: value, "device": value.device.type, "whole": True}
    if isinstance(value, dict):
        return {key: _encoded(inner, parameter) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_encoded(inner, parameter) for inner in value)
    return value


def _layout(tensor: DTensor) -> tuple[object, ...]:
    return tensor.shape, tensor.device_mesh, tensor.placements


def _decoded(value: Any, parameter: Tensor) -> Any:
    if isinstance(value, dict) and _SHARD in value:
        # Tensors arrive on the CPU. Some stay there, such as a count of steps.
        device = parameter.device if value["device"] == parameter.device.type else torch.device(value["device"])
        tensor = value[_SHARD].to(device, copy=True)  # what arrives may not be written to
        if value.get("whole"):
            return tensor
        assert isinstance(parameter, DTensor)
        return DTensor.from_local(
            tensor,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    if isinstance(value, dict):
        return {key: _decoded(inner, parameter) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_decoded(inner, parameter) for inner in value)
    return value


def _generators(device: torch.device) -> dict[str, Any]:
    states: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_generators(states: Mapping[str, Any], device: torch.device) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def _without_tensors(value: Any) -> Any:
    # Any other type of tensor is kept, to be tried: most are not plain.
    if type(value) in (Tensor, nn.Parameter):
        return None
    if isinstance(value, dict):
        return {key: _without_tensors(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_tensors(inner) for inner in value)
    return value
