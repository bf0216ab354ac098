"""Where a divided copy of a model first differs from the undivided one, and by how much its gradients differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from titan_core.api import ModelPart, Replicate, matches
from titan_core.api.parallel.model_part import PrunedModule
from titan_core.api.parallel.step import is_shape_inference
from titan_core.model.materialise import local_box

_Event = tuple[str, bool, int]
"""Name of a module, whether its call ends, and the number of the call."""


@dataclass(frozen=True)
class WrongGradient:
    """How a gradient differs from that of one device."""

    size: float
    """Norm of the difference, relative to the expected gradient of the same elements."""
    factor: float | None
    """The gradient is this multiple of the expected one; ``None``: of none."""

    def __str__(self) -> str:
        if self.factor is None:
            return f"another gradient than on one device (it differs by {100 * self.size:.3g} %)"
        if self.factor == 0.0:
            return "no gradient"
        share = 1 / abs(self.factor)
        mean = 0 < self.factor < 0.9 and abs(share - round(share)) < 1e-3
        return f"{self.factor:.5g} times its gradient on one device{', as of a mean in place of a sum' if mean else ''}"


def compare_gradients(found: Tensor, wanted: Tensor, bound: float) -> WrongGradient | None:
    """Return how ``found`` differs from ``wanted``; ``None`` if the norm of the difference is at most ``bound``."""
    distance = float((found - wanted).norm())
    if distance <= bound:
        return None
    square = float((wanted * wanted).sum())
    if not square:
        return WrongGradient(float("inf"), None)
    factor = float((found * wanted).sum()) / square
    multiple = float((found - factor * wanted).norm()) <= max(bound, 1e-3 * distance)
    return WrongGradient(distance / square**0.5, round(factor, 4) if multiple else None)


class Recorder:
    """Records the hidden states that modules take and return, and the gradients of some of them, in a forward and backward
    pass."""

    def __init__(self, modules: Sequence[nn.Module], differentiated: Collection[str]) -> None:
        """
        Args:
            differentiated: names of the modules whose gradients to record. Not of those within a region of tensor
                parallelism, where gradients may be addends.
        """
        self._modules, self._differentiated = modules, differentiated
        self._calls: Counter[tuple[str, bool]] = Counter()
        self._handles: list[RemovableHandle] = []
        self.values: dict[_Event, Tensor | None] = {}
        self.gradients: dict[_Event, Tensor] = {}

    def __enter__(self) -> Recorder:
        for root in self._modules:
            for name, module in root.named_modules():
                if name and not isinstance(module, PrunedModule):  # passes on another stage's hidden states
                    self._handles.append(module.register_forward_pre_hook(partial(self._enter, name)))
                    self._handles.append(module.register_forward_hook(partial(self._leave, name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, name: str, module: nn.Module, arguments: tuple[Any, ...]) -> Any:
        return (self._keep(name, False, arguments[0]), *arguments[1:]) if arguments else None

    def _leave(self, name: str, module: nn.Module, arguments: Any, output: Any) -> Any:
        return self._keep(name, True, output) if isinstance(output, Tensor) else None

    def _keep(self, name: str, ends: bool, value: Any) -> Any:
        if is_shape_inference():
            return value
        event = (name, ends, self._calls[name, ends])
        self._calls[name, ends] += 1
        comparable = isinstance(value, Tensor) and value.dim() > 2 and value.is_floating_point()
        self.values[event] = value.detach().clone() if comparable else None
        if comparable and name in self._differentiated and value.requires_grad:
            value = value.view_as(value)  # whose gradient is that of this use alone
            value.register_hook(partial(self._keep_gradient, event))
        return value

    def _keep_gradient(self, event: _Event, gradient: Tensor) -> None:
        self.gradients[event] = gradient.detach().clone()

    def order(self) -> dict[str, int]:
        """Return when each module was left last."""
        return {name: number for number, (name, ends, _) in enumerate(self.values) if ends}

    def calls(self, name: str) -> int:
        """Return how often a forward pass calls the module ``name``."""
        return self._calls[name, True]


@dataclass(frozen=True)
class Share:
    """What a rank computes of the undivided copy's tensors."""

    rows: Sequence[int]
    """The sequences that it computes, in order."""
    columns: Tensor | None
    """The positions of each sequence that it holds; ``None``: all."""
    sequences: int
    """Number of sequences of the undivided copy."""


def first_difference(one: Recorder, several: Recorder, share: Share) -> tuple[int, str, str] | None:
    """Return when, in the order of the undivided copy, the divided one first has other hidden states, where (in a module, or
    in the code that calls it), and the module if it is in one."""
    inside: list[str] = []
    for number, ((name, ends, call), expected) in enumerate(one.values.items()):
        if not _agree(one, several, several.values, (name, ends, call), expected, share):
            where = f"module {name!r}" if ends else f"the forward of {_shown(inside)}, before it calls {name!r},"
            return number, f"{where} computes another result than on one device", name if ends else ""
        if ends:
            inside.pop()
        else:
            inside.append(name)
    return None


def last_difference(one: Recorder, several: Recorder, share: Share, repeats: float) -> tuple[int, str, str] | None:
    """Return when, in the order of the undivided copy's forward pass, a gradient of hidden states last differs, where, and
    the module: the backward pass comes there first.

    Args:
        repeats: how often the divided copies compute each sequence of the undivided one.
    """
    for number, event in reversed(list(enumerate(one.values))):
        gradient = one.gradients.get(event)
        if gradient is None or _agree(one, several, several.gradients, event, gradient / repeats, share):
            continue
        name, ends, _ = event
        where = f"after module {name!r}" if ends else f"of module {name!r}"
        text = f"the backward pass {where} computes another gradient of its hidden states than on one device"
        return number, text, "" if ends else name
    return None


def _shown(inside: list[str]) -> str:
    return f"module {inside[-1]!r}" if inside else "the model"


def _agree(one: Recorder, several: Recorder, found: Any, event: _Event, expected: Tensor | None, share: Share) -> bool:
    """Whether what the divided copy computes at ``event``, in each microbatch, may be this rank's share of ``expected``.
    What cannot be compared agrees."""
    name, ends, call = event
    calls = one.calls(name)
    for microbatch in range(several.calls(name) // max(1, calls)):
        own = found.get((name, ends, microbatch * calls + call))
        if own is None or expected is None or own.dim() != expected.dim() or expected.shape[0] != share.sequences:
            continue
        rows = share.rows[microbatch * len(own) : (microbatch + 1) * len(own)]
        if len(rows) == len(own) and not _is_share(own, expected[list(rows)], share.columns):
            return False
    return True


def _is_share(found: Tensor, whole: Tensor, columns: Tensor | None) -> bool:
    tolerance = 1e-3 * float(whole.abs().max())
    shares = [candidate for candidate in _shares(whole, columns) for candidate in _pieces(candidate, found)]
    return not shares or any(torch.allclose(one, found, rtol=0.0, atol=tolerance, equal_nan=True) for one in shares)


def _shares(whole: Tensor, columns: Tensor | None) -> Iterator[Tensor]:
    """Yield ``whole``, and its positions ``columns`` in each dimension that may be the sequence."""
    yield whole
    for dim in range(1, whole.dim()) if columns is not None else ():
        if whole.shape[dim] > len(columns) and whole.shape[dim] > int(columns.max()):  # type: ignore[arg-type, union-attr]
            yield whole.index_select(dim, columns)  # type: ignore[arg-type]


def _pieces(whole: Tensor, found: Tensor) -> Iterator[Tensor]:
    """Yield the equal pieces of ``whole``, along any dimension, that have the shape of ``found``."""
    differing = [dim for dim in range(found.dim()) if found.shape[dim] != whole.shape[dim]]
    if not differing:
        yield whole
    elif len(differing) == 1:
        dim = differing[0]
        if found.shape[dim] and whole.shape[dim] % found.shape[dim] == 0:
            yield from whole.split(found.shape[dim], dim)


def share_that_fails(error: Exception, parts: Sequence[ModelPart]) -> str | None:
    """Return which module with parameters raised ``error``, what it was called with, and the rules of its parameters and of
    the whole ones in its region. If no module with parameters did, name the innermost module whose code raised it; ``None``:
    none did."""
    modules = {id(module): (name, module, part) for part in parts for name, module in part.module.named_modules()}
    found: tuple[str, nn.Module, ModelPart] | None = None
    inside, raised = list[str](), False
    called_with: list[int] | None = None
    traceback = error.__traceback__
    while traceback is not None:
        variables = traceback.tb_frame.f_locals
        place = modules.get(id(variables.get("self")))
        if place is not None:
            inside = [place[0]] if place[0] else []
            raised = True
        if place is not None and next(place[1].parameters(recurse=False), None) is not None:
            found = place
            called_with = next((list(value.shape) for value in variables.values() if isinstance(value, Tensor)), None)
        traceback = traceback.tb_next
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if found is None:
        return f"the forward of {_shown(inside)} raised {text}" if raised else None
    name, module, part = found
    layout = part.layout
    own = []
    for path, parameter in module.named_parameters(name, recurse=False):
        local, whole = list(local_box(parameter)[0].shape), list(parameter.shape)
        share = "" if local == whole else f", of which a rank has {local}"
        own.append(f"{path!r} {whole}, rule {layout.rule(path)}{share}")
    region = next(
        (path for path, _ in part.module.named_modules() if matches(path, layout.regions) and _holds(path, name)), name
    )
    others = [
        repr(path)
        for path, _ in part.module.get_submodule(region).named_parameters(region)
        if not _holds(name, path) and isinstance(layout.rule(path), Replicate | None)
    ]
    beside = f"; whole in its region {region!r}: {', '.join(others[:4])}" if others else ""
    given = "" if called_with is None else f", called with a tensor {called_with},"
    return (
        f"module {name!r}{given} cannot compute with a rank's share of its parameters ({'; '.join(own)}{beside}): Column() "
        "takes whole features and divides its outputs, Row() takes divided ones, a parameter that meets divided features "
        "needs Shard(dim), and one that meets whole ones Replicate()"
        + ("" if isinstance(error, RuntimeError) else f". It raised {text}")  # torch's own say only that shapes do not fit
    )


def _holds(outer: str, name: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")
