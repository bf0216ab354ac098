"""Model definitions and parts of models that functions of plugins return. The functions within them are guarded, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from titan_core.api import Computed, Ref
from titan_core.api.plugins.ref import CodeOrigin
from titan_core.plugins.guarded_object import Check, WrongResult, shown
from titan_core.plugins.result_objects import an_objective
from titan_core.plugins.result_values import anything, figure, is_figure, is_word, module, require, tensor


def owned(ref: Ref[Any], origin: CodeOrigin, row: str) -> Ref[Any]:
    """Return ``ref`` with ``origin``, which guards its target. ``row``: see :data:`~titan_core.plugins.results.RETURNS`."""
    return replace(ref, origin=origin, purpose=row)


def definition(origin: CodeOrigin, result: Any) -> Any:
    """The functions of the definition and of its layout are guarded too."""
    from titan_core.api import ModelDefinition, ModelLayout, Router

    require(isinstance(result, ModelDefinition), result, "return a ModelDefinition")
    layout = result.layout
    if not isinstance(layout, ModelLayout):
        raise WrongResult(f"returned a layout that is {shown(layout)}; it must be a ModelLayout")
    sizes = {name: getattr(layout, name) for name in ("num_blocks", "dim", "vocab_size", "max_seq_len")}
    for name, size in {**sizes, "num_params": result.num_params}.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise WrongResult(f"returned {name} = {shown(size)}; it must be a whole number, at least 1")
    if not all(map(is_figure, layout.block_costs)):
        raise WrongResult(f"returned block_costs = {shown(layout.block_costs)}; they must be finite, and at least 0")
    active = result.num_active_params
    if active is not None and not (
        isinstance(active, int) and not isinstance(active, bool) and 1 <= active <= result.num_params
    ):
        must = f"it must be None or a whole number, from 1 to num_params = {result.num_params}"
        raise WrongResult(f"returned num_active_params = {shown(active)}; {must}")
    if not (isinstance(layout.routers, Mapping) and all(isinstance(router, Router) for router in layout.routers.values())):
        raise WrongResult(f"returned routers = {shown(layout.routers)}; it must map patterns to Routers")
    if not (isinstance(layout.exact, tuple) and all(isinstance(pattern, str) for pattern in layout.exact)):
        raise WrongResult(f"returned exact = {shown(layout.exact)}; it must be a tuple of patterns")
    _require_shapes(layout.statistics, "returned")
    mixers = {
        name: mixer if mixer.divided is None else replace(mixer, divided=owned(mixer.divided, origin, "Mixer.divided"))
        for name, mixer in layout.mixers.items()
    }
    buffers = {
        name: origin.guard(f"its layout's buffer {name!r}", make, WITHIN["ModelLayout.buffers"])
        for name, make in layout.buffers.items()
    }
    parameters = {
        name: replace(value, values=owned(value.values, origin, "Computed.values")) if isinstance(value, Computed) else value
        for name, value in layout.parameters.items()
    }
    return replace(
        result,
        layout=replace(layout, mixers=mixers, buffers=buffers, parameters=parameters),
        build=origin.guard("its definition's build", result.build, WITHIN["ModelDefinition.build"]),
        flops_per_token=origin.guard(
            "its definition's flops_per_token", result.flops_per_token, WITHIN["ModelDefinition.flops_per_token"]
        ),
    )


def _require_shapes(statistics: Any, did: str) -> None:
    """Require names and shapes of what modules count, of a layout or of a part."""
    shapes = statistics.values() if isinstance(statistics, Mapping) and all(map(is_word, statistics)) else [None]
    if not all(isinstance(shape, tuple) and all(type(size) is int and size > 0 for size in shape) for shape in shapes):
        must = "it must map names, each a word of letters, digits and _, to shapes: tuples of whole numbers, at least 1"
        raise WrongResult(f"{did} statistics = {shown(statistics)}; {must}")


class GuardedCall:
    """A function that a transform leaves on a part of the model, guarded."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.__call = call

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        return self.__call(*arguments)


def parts(origin: CodeOrigin, result: Any) -> Any:
    """One model part or several. What the transform has left on them is guarded."""
    from titan_core.api import ModelPart

    found = [result] if isinstance(result, ModelPart) else result
    right = isinstance(found, list | tuple) and bool(found) and all(isinstance(part, ModelPart) for part in found)
    require(right, result, "return the ModelPart, or a list of ModelParts")
    for part in found:
        names = {name for name, _ in part.module.named_parameters(remove_duplicate=False)}
        if not isinstance(part.copies, Mapping) or not set(part.copies) <= names:
            raise WrongResult(f"left copies = {shown(part.copies)}; they must name parameters of the part")
        _require_shapes(part.statistics, "left")
        part.objective = an_objective(origin, part.objective)
        for name in ("batch_transforms", "after_evaluation", "weights_changed"):
            guarded = [
                one if isinstance(one, GuardedCall) else GuardedCall(origin.guard(name, one, WITHIN[f"ModelPart.{name}"]))
                for one in getattr(part, name)
            ]
            setattr(part, name, tuple(guarded))
    return result


def _batch(origin: CodeOrigin, result: Any) -> Any:
    from titan_core.api import Batch

    require(isinstance(result, Batch), result, "return a Batch")
    return result


WITHIN: Final[dict[str, Check]] = {
    "ModelDefinition.build": module,
    "ModelDefinition.flops_per_token": figure,
    "ModelLayout.buffers": tensor,
    "ModelPart.batch_transforms": _batch,
    "ModelPart.after_evaluation": anything,
    "ModelPart.weights_changed": anything,
}
"""Function within a definition, its layout or a part (``Class.field``) -> the check of its result."""
