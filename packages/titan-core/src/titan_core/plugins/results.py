"""What the functions of a plugin must return: one row for each function of a component, each method of an object that one of
them builds, and each lifecycle hook. A function without a row cannot be called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import islice
from typing import Any, Final

from pydantic import BaseModel

from titan_core.api import CheckResult, Costs, ExtraField, ForeignTensor, OptimizerCosts, Problem, StoredModel
from titan_core.api.data.dataset import SavedPosition
from titan_core.api.plugins.ref import CodeOrigin
from titan_core.plugins.guarded_object import Check, WrongResult, shown
from titan_core.plugins.result_models import WITHIN, definition, owned, parts
from titan_core.plugins.result_objects import a_source, a_tokenizer, an_objective, object_of
from titan_core.plugins.result_values import (
    anything,
    at_least,
    figure,
    figures,
    finite_values,
    instance_of,
    is_figure,
    list_of,
    require,
    skip,
    state,
    tensors,
)
from titan_core.toolkit.hookspecs import JobFact

MOST_ITEMS = 1000
"""Limit for the problems and results of one check, which may be an endless generator."""
_END = object()


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


def _model_keys(origin: CodeOrigin, result: Any) -> Any:
    right = isinstance(result, Mapping) and all(isinstance(key, str) and key.startswith("model.") for key in result)
    require(right, result, 'return a mapping from keys of [model], such as "model.from_pretrained", to values')
    return result


def _fields(origin: CodeOrigin, result: Any) -> Any:
    right = isinstance(result, Mapping) and all(
        isinstance(name, str) and name.isidentifier() and isinstance(field, ExtraField) for name, field in result.items()
    )
    require(right, result, "return a mapping from names to ExtraFields")
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
            wrong = [one for one in numbers if isinstance(one, int | float) and not (is_figure(one) or one in (True, False))]
            if wrong:
                raise WrongResult(f"returned {field.name} = {shown(value)}; it must be finite, and at least 0")
    require(result.after_update_every >= 1, result.after_update_every, "return after_update_every of at least 1")
    return result


def _optimizer_costs(origin: CodeOrigin, result: Any) -> Any:
    require(isinstance(result, OptimizerCosts), result, "return OptimizerCosts")
    for name, value in vars(result).items():
        if isinstance(value, int | float) and not isinstance(value, bool) and not is_figure(value):
            raise WrongResult(f"returned {name} = {shown(value)}; it must be finite, and at least 0")
    if result.matrix_flops is None:
        return result
    flops = origin.guard("the matrix_flops of its costs", result.matrix_flops, figure)
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


def _commands(origin: CodeOrigin, result: Any) -> Any:
    from titan_core.api.observe.events import NextCommand  # imports torch

    return list_of(NextCommand, none=True)(origin, result)


RETURNS: Final[dict[str, Check]] = {
    "Model.define": definition,
    **WITHIN,
    "Computed.values": finite_values,
    "Mixer.divided": instance_of(Callable, "return a function"),  # type: ignore[arg-type]
    "Slot.accepts": anything,
    "WeightFormat.tensors": list_of(ForeignTensor),
    "WeightFormat.to_args": instance_of(BaseModel, "return the model's arguments"),
    "WeightFormat.notes": list_of(str),
    "WeightFormat.from_args": instance_of(dict),
    "Transform.apply": parts,
    "Transform.active": instance_of(bool, "return True or False"),
    "Transform.check": _problems,
    "Transform.checks.model": _problems,
    "Transform.checks.hardware": _problems,
    "Transform.steps.runner": object_of("titan_core.api.parallel.step:StepRunner"),
    "Transform.steps.observer": _hooked,
    "Transform.planning.choices": _choices,
    "Transform.planning.costs": _costs,
    "Observer.build": _hooked,
    "Observer.active": instance_of(bool, "return True or False"),
    "Observer.check": _problems,
    "Dataset.build": a_source,
    "Dataset.check": _problems,
    "Dataset.describe": list_of(str),
    "Dataset.extras": _fields,
    "RecordFormat.convert": anything,
    "Tokenizer.build": a_tokenizer,
    "ModelHub.locate": instance_of(str),
    "Optimizer.costs": _optimizer_costs,
    "Optimizer.build": object_of("torch.optim:Optimizer", "titan_core.api.training.optimizer:SkipsOnDevice"),
    "Objective.build": an_objective,
    "Objective.check": _problems,
    "Objective.reference": _model_keys,
    "LRSchedule.build": object_of("torch.optim.lr_scheduler:LRScheduler"),
    "LRSchedule.check": _problems,
    "Checkpoint.build": object_of("titan_core.api.checkpoint.store:CheckpointStore"),
    "Checkpoint.active": instance_of(bool, "return True or False"),
    "Checkpoint.check": _problems,
    "Checkpoint.find_model": _stored,
    "Checkpoint.resumes_after": at_least(0),
    "Checkpoint.set_aside": list_of(str),
    "Checkpoint.find_position": instance_of(SavedPosition, none=True),
    "StoredModel.load": anything,
    "Command.arguments": anything,
    "Command.run": instance_of(int, "return the exit status"),
    "Launcher.arguments": anything,
    "Launcher.run": instance_of(int, "return the exit status"),
    "HealthCheck.check": _health,
    # Lifecycle hooks
    "titan_job_facts": list_of(JobFact, none=True),
    "titan_before_update": skip,
    "titan_figures": figures,
    "titan_save_state": state,
    "titan_state_tensors": tensors,
    "titan_diagnose": instance_of(str, none=True),
    "titan_next_commands": _commands,
    **dict.fromkeys(
        (
            "titan_job_assembled", "titan_restore_state", "titan_train_start", "titan_step_start", "titan_step_cancelled",
            "titan_gradients_complete", "titan_step_end", "titan_metrics", "titan_validation_end", "titan_sample",
            "titan_finding", "titan_flush", "titan_checkpoint_saved", "titan_train_end",
        ),
        anything,
    ),
}  # fmt: skip
"""Function of a component (``Class.field``) or lifecycle hook -> the check of its result."""
