"""Initial values that the library computes in several operations, as programs: recorded while it does, and run by Titan for
each element, with random numbers that no mesh changes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from titan_core.api import Elements
from titan_models_hf.torch_private import version_of

Step = list[Any]
"""Name of an operation, then its arguments: numbers, and ``"%n"``, the result of step ``n``."""

_ELEMENTWISE: Final[Mapping[str, Callable[..., Tensor]]] = {
    "log": torch.log,
    "exp": torch.exp,
    "neg": torch.neg,
    "expm1": torch.expm1,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "clamp": torch.clamp,
    "clamp_min": torch.clamp_min,
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "pow": torch.pow,
}
_SAME: Final = {
    "rsub": "sub", "truediv": "div", "rtruediv": "div", "rdiv": "div", "true_divide": "div", "itruediv": "div",
    "rpow": "pow", "rmul": "mul", "imul": "mul", "radd": "add", "iadd": "add", "isub": "sub",
}  # fmt: skip
"""Names of operators -> the operation."""
_LARGEST_TABLE: Final = 4096
"""Elements of a tensor that a program may contain."""


class ProgramRecorder(TorchFunctionMode):
    """Records how tensors are computed from uniform random numbers and constants, while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[Step] = []
        self._step_of: dict[int, tuple[int, int]] = {}
        """Id of a tensor -> the step that computed it, and its version then, which writing to it or to a view raises."""
        self._kept: list[Tensor] = []  # the ids above stay theirs

    def program(self, tensor: Tensor) -> str | None:
        """Return the program that computes ``tensor``, as text; ``None`` if it is unknown."""
        last = self._of(tensor)
        if last is None:
            return None
        needed = {last}
        for number in range(last, -1, -1):
            if number in needed:
                needed |= set(_operands(self._steps[number]))
        numbers = {number: place for place, number in enumerate(sorted(needed))}
        return json.dumps([_renumbered(self._steps[number], numbers) for number in numbers])

    def uniform(self, tensor: Tensor, low: float, high: float) -> None:
        """Record that ``tensor`` has been filled with random numbers."""
        self._record(tensor, ["uniform", low, high])

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        step = self._step(getattr(function, "__name__", ""), arguments, dict(keywords or {}))
        result = function(*arguments, **(keywords or {}))
        if isinstance(result, Tensor) and step is not None:
            self._record(result, step)
        return result

    def _record(self, tensor: Tensor, step: Step) -> None:
        self._step_of[id(tensor)] = len(self._steps), version_of(tensor)
        self._steps.append(step)
        self._kept.append(tensor)

    def _step(self, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Step | None:
        """Return the step that a call computes, before it may change its arguments; ``None`` if it is unknown."""
        flipped = name in ("rsub", "__rsub__", "__rtruediv__", "__rdiv__", "__rpow__")
        name = _SAME.get(name.strip("_"), name.strip("_"))
        if name in ("rand", "rand_like"):
            return ["uniform", 0.0, 1.0]
        if name == "uniform":
            bounds = {"from": 0.0, "to": 1.0, **dict(zip(("from", "to"), arguments[1:], strict=False)), **keywords}
            return ["uniform", float(bounds["from"]), float(bounds["to"])] if len(bounds) == 2 else None
        if name not in _ELEMENTWISE or not keywords.keys() <= {"min", "max"}:
            return None
        given = [*arguments, *([keywords.get("min"), keywords.get("max")] if keywords else [])]
        found = [self._of(one) if isinstance(one, Tensor) else None for one in given]
        if any(isinstance(one, Tensor) and number is None for one, number in zip(given, found, strict=True)):
            return None
        operands = [one if number is None else f"%{number}" for one, number in zip(given, found, strict=True)]
        return [name, *(reversed(operands) if flipped else operands)]

    def _of(self, tensor: Tensor) -> int | None:
        """Return the step that has computed ``tensor``: a table, if it is small and has values."""
        step, version = self._step_of.get(id(tensor), (None, None))
        if version == version_of(tensor):
            return step
        if tensor.is_meta or not 0 < tensor.numel() <= _LARGEST_TABLE:
            return None
        self._record(tensor, ["table", *tensor.detach().double().flatten().tolist()])
        return len(self._steps) - 1


def _operands(step: Step) -> list[int]:
    return [int(item[1:]) for item in step[1:] if isinstance(item, str)]


def _renumbered(step: Step, numbers: Mapping[int, int]) -> Step:
    return [step[0], *(f"%{numbers[int(item[1:])]}" if isinstance(item, str) else item for item in step[1:])]


def run(elements: Elements, program: str) -> Tensor:
    """Return the values of ``elements`` by a recorded program."""
    results: list[Tensor] = []
    for name, *arguments in json.loads(program):
        operands = [results[int(one[1:])] if isinstance(one, str) and one.startswith("%") else one for one in arguments]
        if name == "uniform":
            low, high = operands
            results.append(elements.uniform() * (high - low) + low)
        elif name == "table":
            results.append(_looked_up(elements, operands))
        else:
            results.append(_ELEMENTWISE[name](*map(_tensor, operands[:1]), *operands[1:]))
    return results[-1]


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value)


def _looked_up(elements: Elements, values: list[Any]) -> Tensor:
    """Return the values at the elements' positions; one value is that of all."""
    flat = torch.zeros_like(elements.index[0])
    for size, index in zip(elements.shape, elements.index, strict=True):
        flat = flat * size + index
    table = torch.tensor(values, device=flat.device, dtype=torch.float32)
    return table.expand(math.prod(elements.shape))[flat] if len(values) == 1 else table[flat]
