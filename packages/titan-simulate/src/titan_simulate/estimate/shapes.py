"""The names and shapes of a model, from its modules on the meta device. The one file here that imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from pydantic import BaseModel
from torch import nn
from torch.overrides import TorchFunctionMode

from titan_core.api import ModelDefinition, Ref


@dataclass(frozen=True)
class ModelShapes:
    """What a model consists of, as plain values."""

    parameters: dict[str, tuple[int, ...]]
    """Name -> shape; tied parameters once."""
    modules: tuple[str, ...]


def shapes_of(define: Ref[Callable[[Any], ModelDefinition]], args: BaseModel) -> ModelShapes:
    """Return the shapes of the model that ``define`` describes with ``args``. Allocates no weights."""
    with torch.device("meta"), _Uninitialised():
        model = cast(nn.Module, define.load()(args).build())
    parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return ModelShapes(parameters, tuple(name for name, _ in model.named_modules()))


class _Uninitialised(TorchFunctionMode):
    """Skips the initial values of ``torch.nn.init``, which would take seconds to compute nothing."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__module__", "") == "torch.nn.init" and args:
            return args[0]
        return function(*args, **(kwargs or {}))
