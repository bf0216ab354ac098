"""Integers that modules of the model count in each step, such as the tokens of each expert."""

from __future__ import annotations

import torch
from torch import Tensor

from titan_core.api.parallel.microbatch import Microbatch, StepCounts, current_microbatch
from titan_core.api.parallel.step import is_shape_inference
from titan_core.api.plugins.errors import UserError


@torch.compiler.disable  # type: ignore[untyped-decorator]
def add_statistic(
    carrier: Tensor, name: str, values: Tensor, *, index: int | tuple[int, ...] = (), divided: bool | None = None
) -> Tensor:
    """Add ``values`` to a statistic of the step, which is summed over the global batch: over microbatches, pipeline stages,
    ranks that see different tokens, and replica groups. The sums are integers, so they are exactly the same on every mesh
    on which the model computes the same. Observers, and the observer of a transform, get them in
    :attr:`StepReport.statistics <titan_core.api.StepReport.statistics>`, before a checkpoint is saved.

    Compiled code is interrupted here, which is an error if ``compile.fullgraph = true`` is set. A module that knows its
    layer by number reads the number in a method marked ``torch.compiler.disable``: otherwise the compiler makes a version of
    the module for each layer.

    The values are counted when the backward pass reaches ``carrier``, once for each microbatch. Recomputation, validation,
    generation and what observers repeat do not count, nor does a step that is abandoned. Outside a training step the
    function does nothing.

    Args:
        carrier: a tensor that the objective depends on, and that has a gradient: hidden states.
        name: declared, with the shape of the whole statistic, in the layout if a module of the model counts
            (:attr:`titan_core.api.ModelLayout.statistics`), or else by the transform that adds the module
            (:attr:`titan_core.api.ModelPart.statistics`).
        values: integers or booleans, of this rank's positions of the microbatch; of the statistic's shape without the
            dimensions that ``index`` selects from.
        index: where to add ``values``, such as the number of the layer: an index of the statistic's first dimension, or of
            several.
        divided: whether tensor-parallel ranks count different things, so that all of them count. Otherwise all of them must
            count the same, and one counts. Default: whether they have different positions of ``carrier``, ``[batch, seq,
            ...]`` or ``[batch * seq, features]``, as they do outside regions under sequence parallelism.

    Returns:
        ``carrier``, unchanged.

    Raises:
        UserError: the statistic is not declared or has another shape, the values are no integers, ``carrier`` has no
            gradient, or its shape does not say whether it is divided.
    """
    microbatch = current_microbatch()
    if microbatch is None or microbatch.statistics is None or not torch.is_grad_enabled() or is_shape_inference():
        return carrier
    place = index if isinstance(index, tuple) else (index,)
    _check(microbatch.statistics, name, values, place)
    if not carrier.requires_grad:
        raise _error(
            name, "is attached to a tensor without a gradient", "attach it to one that depends on trained parameters"
        )
    if divided is None:
        divided = _is_divided(carrier, name, microbatch, microbatch.statistics.ranks)
    carrier.register_hook(_Once(microbatch.statistics, name, place, values.detach(), divided))
    return carrier


def _check(statistics: StepCounts, name: str, values: Tensor, index: tuple[int, ...]) -> None:
    """
    Raises:
        UserError: see :func:`add_statistic`.
    """
    whole = statistics.values.get(name)
    if whole is None:
        fix = f"add {name!r} to `statistics` of the model's layout, or of the part"
        raise _error(name, "is counted by a module, but declared by neither the model nor a transform", fix)
    if values.is_floating_point() or values.is_complex():
        raise _error(name, f"has values of {values.dtype}", "count integers, whose sums are exact")
    sizes = whole.shape[: len(index)]
    inside = len(index) <= whole.dim() and all(0 <= at < size for at, size in zip(index, sizes, strict=True))
    if not inside or values.shape != whole.shape[len(index) :]:
        given = f"values of shape {list(values.shape)} at index {list(index)}"
        raise _error(name, f"is declared with shape {list(whole.shape)}, but a module adds {given}", "correct one of them")


def _is_divided(carrier: Tensor, name: str, microbatch: Microbatch, ranks: int) -> bool:
    """Whether the ``ranks`` of tensor parallelism have different positions of ``carrier``.

    Raises:
        UserError: its shape does not say so.
    """
    sequences, positions = microbatch.batch.tokens.shape
    shapes = {False: (sequences, positions), True: (sequences, positions / ranks)}
    for divided, shape in shapes.items():
        if tuple(carrier.shape[:2]) == shape or (carrier.dim() == 2 and carrier.shape[0] == shape[0] * shape[1]):
            return divided
    why = f"is attached to a tensor of shape {list(carrier.shape)}, for {sequences} sequences of {positions} positions"
    raise _error(name, why, "pass divided=True if tensor-parallel ranks count different things, otherwise divided=False")


def _error(name: str, why: str, fix: str) -> UserError:
    return UserError.one(f"statistic {name!r}", why, fix)


class _Once:
    """Counts when the gradient of a tensor is complete. A hook, not a function of autograd, because a pipeline's stage may
    return the tensor, and zero-bubble schedules refuse stages that return a view."""

    def __init__(self, statistics: StepCounts, name: str, index: tuple[int, ...], values: Tensor, divided: bool) -> None:
        self._statistics = statistics
        self._pending: tuple[str, tuple[int, ...], Tensor, bool] | None = (name, index, values, divided)

    def __call__(self, gradient: Tensor) -> None:
        if self._pending is not None:  # schedules may compute gradients of inputs and of weights separately
            self._statistics.add(*self._pending)
            self._pending = None
