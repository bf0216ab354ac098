"""What the functions of a plugin must return: one row for each function of a component, each method of an object that one of
them builds, and each lifecycle hook. A function without a row cannot be called."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Final

from pydantic import BaseModel

from titan_core.api import (
    CheckResult,
    Computed,
    Costs,
    ExtraField,
    ForeignTensor,
    OptimizerCosts,
    Problem,
    Ref,
    RenderedChat,
    StoredModel,
    WeightedTokens,
)
from titan_core.api.data.dataset import DocumentPlace
from titan_core.api.data.replay import SavedPosition
from titan_core.api.plugins.ref import CodeOrigin
from titan_core.plugins.guarded_object import Check, WrongResult, class_at, guarded_object, shown
from titan_core.toolkit.jobs import JobFact
from titan_core.toolkit.plain_json import survives_json

MOST_ITEMS = 1000
"""Limit for the problems and results of one check, which may be an endless generator."""
_END = object()


def require(holds: bool, result: object, must: str) -> None:
    """Raise that the function returned ``result`` and what it ``must`` do, unless the result ``holds``."""
    if not holds:
        raise WrongResult(f"returned {shown(result)}; it must {must}")


def _a(kind: type, must: str = "", none: bool = False) -> Check:
    """Return the check for an instance of ``kind`` (``bool`` is no ``int``), or ``None`` if that is allowed."""
    must = must or f"return a {kind.__name__}" + (" or None" if none else "")

    def check(origin: CodeOrigin, result: Any) -> Any:
        right = isinstance(result, kind) and (kind is not int or not isinstance(result, bool))
        require(right or (none and result is None), result, must)
        return result

    return check


def _from(low: int, none: bool = False) -> Check:
    """Return the check for a whole number of at least ``low``."""

    def check(origin: CodeOrigin, result: Any) -> Any:
        right = isinstance(result, int) and not isinstance(result, bool) and result >= low
        must = f"be a whole number, at least {low}" + (", or None" if none else "")
        if not (right or (none and result is None)):
            raise WrongResult(f"is {shown(result)}; it must {must}")
        return result

    return check


def _list_of(kind: type, none: bool = False) -> Check:
    def check(origin: CodeOrigin, result: Any) -> Any:
        if none and result is None:
            return []
        right = isinstance(result, Sequence) and not isinstance(result, str | bytes)
        require(right and all(isinstance(one, kind) for one in result), result, f"return a list of {kind.__name__}")
        return result

    return check


def _problems(origin: CodeOrigin, result: Any) -> list[Problem]:
    """Generators are exhausted here, where their exceptions are caught."""
    must = "return or yield Problems (none if all is well)"
    require(isinstance(result, Iterable) and not isinstance(result, str), result, must)
    problems = list(islice(result, MOST_ITEMS))
    for problem in problems:
        if not isinstance(problem, Problem):
            raise WrongResult(f"found {shown(problem)}; it must {must}")
    return problems


def _health(origin: CodeOrigin, result: Any) -> Iterator[CheckResult]:
    """Results are printed as they come, so the generator is guarded and not exhausted."""
    require(isinstance(result, Iterable) and not isinstance(result, str), result, "return or yield CheckResults")
    iterator = iter(result)
    following = origin.guard("check", lambda: next(iterator, _END), _one_result)
    return islice(iter(following, _END), MOST_ITEMS)


def _one_result(origin: CodeOrigin, result: Any) -> Any:
    if result is not _END and not isinstance(result, CheckResult):
        raise WrongResult(f"found {shown(result)}; it must return or yield CheckResults")
    return result


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _figure(origin: CodeOrigin, result: Any) -> Any:
    require(_is_figure(result), result, "return a finite number, at least 0")
    return result


def _scalar(origin: CodeOrigin, result: Any) -> Any:
    torch: Any = sys.modules["torch"]
    right = isinstance(result, torch.Tensor) and result.dim() == 0 and result.is_floating_point()
    require(right, _described(result), "return a scalar: a tensor of a floating-point type without dimensions")
    return result


def _model_keys(origin: CodeOrigin, result: Any) -> Any:
    right = isinstance(result, Mapping) and all(isinstance(key, str) and key.startswith("model.") for key in result)
    require(right, result, 'return a mapping from keys of [model], such as "model.from_pretrained", to values')
    return result


def _metric_names(origin: CodeOrigin, result: Any) -> Any:
    if not (isinstance(result, tuple) and all(map(_is_word, result))):
        raise WrongResult(f"is {shown(result)}; it must be a tuple of names, each a word of letters, digits and _")
    return result


def _described(result: Any) -> Any:
    """Return ``result``, or the form of a tensor, whose values may be in flight."""
    torch: Any = sys.modules["torch"]
    return _Form(f"a tensor {list(result.shape)} of {result.dtype}") if isinstance(result, torch.Tensor) else result


class _Form(str):
    __repr__ = str.__str__


def _document(origin: CodeOrigin, result: Any) -> Any:
    # Sequences of ids are checked where they become tokens. None would end the data.
    if not isinstance(result, str | WeightedTokens | list | tuple) and not hasattr(result, "dtype"):
        raise WrongResult(f"returned {shown(result)}; a document is a str, an array of token ids or WeightedTokens")
    return result


def _fields(origin: CodeOrigin, result: Any) -> Any:
    right = isinstance(result, Mapping) and all(
        isinstance(name, str) and name.isidentifier() and isinstance(field, ExtraField) for name, field in result.items()
    )
    require(right, result, "return a mapping from names to ExtraFields")
    return result


def _marks(origin: CodeOrigin, result: Any) -> Any:
    right = result is None or (isinstance(result, tuple) and len(result) == 2)
    require(right, result, "return the ids before and those after a document's text, or None")
    return result


def _position_of_document(origin: CodeOrigin, result: Any) -> Any:
    right = isinstance(result, tuple) and len(result) == 2 and all(isinstance(one, int) and one >= 0 for one in result)
    require(right, result, "return the logical shard of a document, and its position there")
    return result


def _newest(origin: CodeOrigin, result: Any) -> Any:
    right = isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], int) and isinstance(result[1], str)
    require(result is None or right, result, "be the step and the path of a checkpoint, or None")
    return result


def _definition(origin: CodeOrigin, result: Any) -> Any:
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
    if not all(map(_is_figure, layout.block_costs)):
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
        name: origin.guard(f"its layout's buffer {name!r}", make, RETURNS["ModelLayout.buffers"])
        for name, make in layout.buffers.items()
    }
    parameters = {
        name: replace(value, values=owned(value.values, origin, "Computed.values")) if isinstance(value, Computed) else value
        for name, value in layout.parameters.items()
    }
    return replace(
        result,
        layout=replace(layout, mixers=mixers, buffers=buffers, parameters=parameters),
        build=origin.guard("its definition's build", result.build, RETURNS["ModelDefinition.build"]),
        flops_per_token=origin.guard(
            "its definition's flops_per_token", result.flops_per_token, RETURNS["ModelDefinition.flops_per_token"]
        ),
    )


def _require_shapes(statistics: Any, did: str) -> None:
    """Require names and shapes of what modules count, of a layout or of a part."""
    shapes = statistics.values() if isinstance(statistics, Mapping) and all(map(_is_word, statistics)) else [None]
    if not all(isinstance(shape, tuple) and all(type(size) is int and size > 0 for size in shape) for shape in shapes):
        must = "it must map names, each a word of letters, digits and _, to shapes: tuples of whole numbers, at least 1"
        raise WrongResult(f"{did} statistics = {shown(statistics)}; {must}")


def _is_word(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier()


def _tensor(origin: CodeOrigin, result: Any) -> Any:
    torch: Any = sys.modules["torch"]
    require(isinstance(result, torch.Tensor), result, "return a tensor")
    return result


def _values(origin: CodeOrigin, result: Any) -> Any:
    torch: Any = sys.modules["torch"]
    right = isinstance(result, torch.Tensor) and result.is_floating_point()
    require(right, _described(result), "return a tensor of floating-point numbers")
    if not bool(torch.isfinite(result).all()):
        raise WrongResult("returned values that are not finite")
    return result


def _module(origin: CodeOrigin, result: Any) -> Any:
    torch: Any = sys.modules["torch"]
    require(isinstance(result, torch.nn.Module), result, "return an nn.Module")
    return result


class GuardedCall:
    """A function that a transform leaves on a part of the model, guarded."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.__call = call

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        return self.__call(*arguments)


def _parts(origin: CodeOrigin, result: Any) -> Any:
    """One model part or several. What the transform has left on them is guarded."""
    from titan_core.api import ModelPart

    parts = [result] if isinstance(result, ModelPart) else result
    right = isinstance(parts, list | tuple) and bool(parts) and all(isinstance(part, ModelPart) for part in parts)
    require(right, result, "return the ModelPart, or a list of ModelParts")
    for part in parts:
        names = {name for name, _ in part.module.named_parameters(remove_duplicate=False)}
        if not isinstance(part.copies, Mapping) or not set(part.copies) <= names:
            raise WrongResult(f"left copies = {shown(part.copies)}; they must name parameters of the part")
        _require_shapes(part.statistics, "left")
        part.objective = RETURNS["Objective.build"](origin, part.objective)
        for name in ("batch_transforms", "after_evaluation", "weights_changed"):
            guarded = [
                one if isinstance(one, GuardedCall) else GuardedCall(origin.guard(name, one, RETURNS[f"ModelPart.{name}"]))
                for one in getattr(part, name)
            ]
            setattr(part, name, tuple(guarded))
    return result


def _batch(origin: CodeOrigin, result: Any) -> Any:
    from titan_core.api import Batch

    require(isinstance(result, Batch), result, "return a Batch")
    return result


def _choices(origin: CodeOrigin, result: Any) -> Any:
    right = isinstance(result, Mapping) and all(
        isinstance(key, str) and isinstance(values, Sequence) and not isinstance(values, str)
        for key, values in result.items()
    )
    require(right, result, "return a mapping from config keys to lists of values")
    return result


def _costs(origin: CodeOrigin, result: Any) -> Any:
    require(isinstance(result, Costs), result, "return Costs")
    for holder in filter(is_dataclass, (result, result.pipeline)):
        for field in fields(holder):
            value = getattr(holder, field.name)
            numbers = value if isinstance(value, tuple) else (value,)
            wrong = [
                one for one in numbers if isinstance(one, int | float) and not (_is_figure(one) or one in (True, False))
            ]
            if wrong:
                raise WrongResult(f"returned {field.name} = {shown(value)}; it must be finite, and at least 0")
    require(result.after_update_every >= 1, result.after_update_every, "return after_update_every of at least 1")
    return result


def _optimizer_costs(origin: CodeOrigin, result: Any) -> Any:
    require(isinstance(result, OptimizerCosts), result, "return OptimizerCosts")
    for name, value in vars(result).items():
        if isinstance(value, int | float) and not isinstance(value, bool) and not _is_figure(value):
            raise WrongResult(f"returned {name} = {shown(value)}; it must be finite, and at least 0")
    if result.matrix_flops is None:
        return result
    flops = origin.guard("the matrix_flops of its costs", result.matrix_flops, _figure)
    return replace(result, matrix_flops=flops)


def _stored(origin: CodeOrigin, result: Any) -> Any:
    require(isinstance(result, StoredModel), result, "return a StoredModel")
    return replace(result, load=owned(result.load, origin, "StoredModel.load"))


def _hooked(origin: CodeOrigin, result: Any) -> Any:
    """An object with lifecycle hooks, which :class:`~titan_core.plugins.lifecycle.Lifecycle` guards."""
    require(result is not None, result, "return the object that it builds")
    if isinstance(result, type):
        raise WrongResult(f"returned the class {result.__name__}; it must return an instance")
    return result


def _skip(origin: CodeOrigin, result: Any) -> Any:
    torch: Any = sys.modules.get("torch")  # if torch is not imported, no tensor exists
    flag = torch is not None and isinstance(result, torch.Tensor) and result.dtype is torch.bool and not result.dim()
    require(result is None or isinstance(result, bool) or flag, result, "return a bool, a 0-d bool tensor or None")
    return result


def _figures(origin: CodeOrigin, result: Any) -> Any:
    must = "return a mapping from names to numbers"
    require(result is None or isinstance(result, Mapping), result, must)
    for name, figure in (result or {}).items():
        if not isinstance(name, str) or not isinstance(figure, float | int | None):
            raise WrongResult(f"returned {shown(name)}: {shown(figure)}; it must {must}")
        if figure is not None and not math.isfinite(figure):
            raise WrongResult(f"returned {name!r}: {figure}; a figure that is unknown or not finite must be None")
    return result or {}


def _state(origin: CodeOrigin, result: Any) -> Any:
    must = "return a dict of plain values with string keys, because it is saved as JSON"
    require(result is None or (isinstance(result, dict) and survives_json(result)), result, must)
    return result or {}


def _tensors(origin: CodeOrigin, result: Any) -> Any:
    torch: Any = sys.modules.get("torch")
    right = isinstance(result, Mapping) and all(
        isinstance(name, str) and torch is not None and isinstance(value, torch.Tensor) for name, value in result.items()
    )
    require(result is None or right, result, "return a mapping from names to tensors")
    return result or {}


def _commands(origin: CodeOrigin, result: Any) -> Any:
    from titan_core.api.observe.events import NextCommand  # imports torch

    return _list_of(NextCommand, none=True)(origin, result)


def _anything(origin: CodeOrigin, result: Any) -> Any:
    """The result of a function that is called for what it does."""
    return result


def owned(ref: Ref[Any], origin: CodeOrigin, row: str) -> Ref[Any]:
    """Return ``ref`` with ``origin``, which guards its target. ``row``: see :data:`RETURNS`."""
    return replace(ref, origin=origin, purpose=row)


def _object(place: str, *optional: str) -> Check:
    """Return the check for an object of the class at ``place``, which may also be of the ``optional`` ones. Its methods are
    guarded. A protocol is recognised by its members, any other class by ``isinstance``."""

    def check(origin: CodeOrigin, result: Any) -> Any:
        name = place.partition(":")[2]
        require(result is not None, result, f"return the {name} that it builds")
        members = OBJECTS[place]
        if place in CLASSES:
            require(isinstance(result, class_at(place)), result, f"return a {name}")
        more = {member: rule for other in optional for member, rule in OBJECTS[other].items()}
        made = guarded_object(origin, result, members, name, more)
        for member in VALUES.get(place, ()):
            rule = members[member]
            assert rule is not None
            origin.guard(member, partial(getattr, made, member), rule)()
        return made

    return check


_DATASET, _TOKENIZER = "titan_core.api.data.dataset", "titan_core.api.data.tokenizer"
_FINGERPRINT = f"{_DATASET}:DocumentSource, optional"
_PLACE = f"{_DATASET}:DocumentShard, optional"

OBJECTS: Final[dict[str, dict[str, Check | None]]] = {
    f"{_DATASET}:DocumentSource": {
        "num_documents": _from(0, none=True),
        "shard": _object(f"{_DATASET}:DocumentShard", _PLACE),
    },
    f"{_DATASET}:DocumentShard": {
        "__iter__": None, "__next__": _document, "state_dict": _a(dict), "load_state_dict": None,
    },
    _FINGERPRINT: {
        "fingerprint": _a(Mapping, none=True), "order": _a(str, none=True),
        "find": _a(DocumentPlace, none=True), "position": _position_of_document,
    },
    _PLACE: {"place": _a(DocumentPlace, none=True)},
    f"{_TOKENIZER}:TextTokenizer": {
        "vocab_size": _from(1), "encode_document": _anything, "decode": _a(str),
        "marks": _marks, "begin_ids": _anything, "end_ids": _anything,
        "describe_special_tokens": _list_of(str), "tokenizer_files": _a(Mapping, none=True), "fingerprint": _a(str),
    },
    f"{_TOKENIZER}:ChatTokenizer": {
        "encode_with_special_tokens": _anything, "require_chat_template": None,
        "render_chat": _a(RenderedChat), "turn_end_ids": _anything,
    },
    "titan_core.api.checkpoint.store:CheckpointStore": {
        "restore": _a(bool), "after_step": None, "newest": _newest, "before_update": None, "close": None,
    },
    "titan_core.api.training.objective:ObjectiveFunction": {
        "__call__": _scalar, "of_frozen": _tensors, "metrics": _metric_names,
    },
    "titan_core.api.parallel.step:StepRunner": {"__call__": _scalar, "evaluate": _scalar},
    "torch.optim:Optimizer": dict.fromkeys(("step", "zero_grad", "state_dict", "load_state_dict")),
    "titan_core.api.training.optimizer:SkipsOnDevice": {"step_unless": None},
    "torch.optim.lr_scheduler:LRScheduler": dict.fromkeys(("step", "state_dict", "load_state_dict")),
    "contextlib:AbstractContextManager": {"__enter__": None, "__exit__": None},
}  # fmt: skip
"""Class of an object that plugins build (``module:name``) -> its methods and properties, and the checks of their results."""

CLASSES: Final = (
    f"{_TOKENIZER}:TextTokenizer",
    "titan_core.api.training.objective:ObjectiveFunction",
    "torch.optim:Optimizer",
    "torch.optim.lr_scheduler:LRScheduler",
)
"""Those that an object must be an instance of."""
VALUES: Final = {
    f"{_DATASET}:DocumentSource": ("num_documents",),
    f"{_TOKENIZER}:TextTokenizer": ("vocab_size",),
    "titan_core.api.training.objective:ObjectiveFunction": ("metrics",),
}
"""Properties that are checked once the object is built."""

RETURNS: Final[dict[str, Check]] = {
    "Model.define": _definition,
    "ModelDefinition.build": _module,
    "ModelDefinition.flops_per_token": _figure,
    "ModelLayout.buffers": _tensor,
    "Computed.values": _values,
    "Mixer.divided": _a(Callable, "return a function"),  # type: ignore[arg-type]
    "Slot.accepts": _anything,
    "WeightFormat.tensors": _list_of(ForeignTensor),
    "WeightFormat.to_args": _a(BaseModel, "return the model's arguments"),
    "WeightFormat.notes": _list_of(str),
    "WeightFormat.from_args": _a(dict),
    "Transform.apply": _parts,
    "ModelPart.batch_transforms": _batch,
    "ModelPart.after_evaluation": _anything,
    "ModelPart.weights_changed": _anything,
    "Transform.active": _a(bool, "return True or False"),
    "Transform.check": _problems,
    "Transform.checks.model": _problems,
    "Transform.checks.hardware": _problems,
    "Transform.steps.runner": _object("titan_core.api.parallel.step:StepRunner"),
    "Transform.steps.observer": _hooked,
    "Transform.planning.choices": _choices,
    "Transform.planning.costs": _costs,
    "Observer.build": _hooked,
    "Observer.active": _a(bool, "return True or False"),
    "Observer.check": _problems,
    "Dataset.build": _object(f"{_DATASET}:DocumentSource", _FINGERPRINT),
    "Dataset.check": _problems,
    "Dataset.describe": _list_of(str),
    "Dataset.extras": _fields,
    "RecordFormat.convert": _anything,
    "Tokenizer.build": _object(
        f"{_TOKENIZER}:TextTokenizer", f"{_TOKENIZER}:ChatTokenizer",
    ),
    "ModelHub.locate": _a(str),
    "Optimizer.costs": _optimizer_costs,
    "Optimizer.build": _object("torch.optim:Optimizer", "titan_core.api.training.optimizer:SkipsOnDevice"),
    "Objective.build": _object("titan_core.api.training.objective:ObjectiveFunction"),
    "Objective.check": _problems,
    "Objective.frozen": _model_keys,
    "LRSchedule.build": _object("torch.optim.lr_scheduler:LRScheduler"),
    "LRSchedule.check": _problems,
    "Checkpoint.build": _object("titan_core.api.checkpoint.store:CheckpointStore"),
    "Checkpoint.active": _a(bool, "return True or False"),
    "Checkpoint.check": _problems,
    "Checkpoint.find_model": _stored,
    "Checkpoint.resumes_after": _from(0),
    "Checkpoint.set_aside": _list_of(str),
    "Checkpoint.find_position": _a(SavedPosition, none=True),
    "StoredModel.load": _anything,
    "Command.arguments": _anything,
    "Command.run": _a(int, "return the exit status"),
    "Launcher.arguments": _anything,
    "Launcher.run": _a(int, "return the exit status"),
    "HealthCheck.check": _health,
    # Lifecycle hooks
    "titan_job_facts": _list_of(JobFact, none=True),
    "titan_before_update": _skip,
    "titan_figures": _figures,
    "titan_save_state": _state,
    "titan_state_tensors": _tensors,
    "titan_diagnose": _a(str, none=True),
    "titan_next_commands": _commands,
    **dict.fromkeys(
        (
            "titan_job_assembled", "titan_restore_state", "titan_train_start", "titan_step_start", "titan_step_cancelled",
            "titan_gradients_complete", "titan_step_end", "titan_metrics", "titan_validation_end", "titan_sample",
            "titan_finding", "titan_flush", "titan_checkpoint_saved", "titan_train_end",
        ),
        _anything,
    ),
}  # fmt: skip
"""Function of a component (``Class.field``) or lifecycle hook -> the check of its result."""
