"""Every function that a plugin may provide is guarded: what it raises, or wrongly returns, is reported with its name.
The functions are enumerated from the contract, so that a new hook, field or method without a guard fails here."""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import titan_core.api
import titan_core.toolkit
from harness.distributions import entry_points_in, write_distribution
from harness.jobs import TINY, run_recipe
from titan_core.api import (
    Component,
    Costs,
    Finding,
    Mixer,
    ModelDefinition,
    ModelPart,
    ObjectiveFunction,
    OptimizerCosts,
    Phase,
    PipelineCosts,
    Ref,
    StoredModel,
    TextTokenizer,
    WeightFormat,
    hookimpl,
    hookspecs,
)
from titan_core.cli import main as command_line
from titan_core.cli.main import main
from titan_core.plugins.component_checks import GROUPS, with_origin
from titan_core.plugins.discovery import REGISTRATION_HOOKS, Discovery, discover
from titan_core.plugins.guard import PASSED_ON_BY, Origin
from titan_core.plugins.guarded_object import guarded_object
from titan_core.plugins.lifecycle import Lifecycle
from titan_core.plugins.registry import Components
from titan_core.plugins.result_objects import OBJECTS
from titan_core.plugins.results import RETURNS
from titan_core.toolkit import hookspecs as toolkit_hooks
from titan_core.toolkit.errors import Interrupted, PluginFailure

INSTALLED = discover()
ORIGIN = Origin("odd", "titan-odd", "1.2", "transform 'odd'")
NAMED = r"plugin 'odd' \(titan-odd 1\.2\): transform 'odd': "
KINDS = sorted(set(REGISTRATION_HOOKS.values()), key=lambda kind: kind.__name__)
SPECS = {
    name: value
    for module in (hookspecs, toolkit_hooks)
    for name, value in vars(module).items()
    if hasattr(value, "titan_spec")
}
LIFECYCLE = [name for name in SPECS if name not in REGISTRATION_HOOKS]
CORES_OWN = {
    "CodeOrigin", "Registry", "CommandContext", "CheckpointEvents", "DataPosition", "StoredModels", "ModelTrial",
    "DataReplay", "RandomAccess", "Simulation", "DecoderArgs",
}  # fmt: skip
"""Protocols that the core implements, or that a plugin only passes to a function of the contract."""
BASES = {"DeferredReports", "ObjectiveFunction"}
"""Base classes of which other functions are guarded: the hooks of an observer, and the objective as a function."""
COPIES = {"DatasetSpec.build", "FormatSpec.convert", "StreamSpec.tokenizer", "TokenizerSpec.build"}
"""Fields that hold a component's reference, which is guarded."""


class Odd(BaseException):
    """An exception of a stranger."""


def end(*_: object) -> object:
    return next(iter(()))


def raises(error: BaseException) -> Callable[..., Any]:
    def function(*_: object, **__: object) -> object:
        raise error

    return function


FAILURES: dict[str, Callable[..., Any]] = {
    "RuntimeError: odd": raises(RuntimeError("odd")),
    "SystemExit: 3": raises(SystemExit(3)),
    "Odd: odd": raises(Odd("odd")),
    "StopIteration": end,
}


def belongs_to(function: str, failure: str) -> bool:
    return any(failure.startswith(kind.__name__) for kind in PASSED_ON_BY.get(function, ()))


def api_classes() -> Iterator[type]:
    """Yield the classes that the modules of the contract and of the toolkit define."""
    packages = (titan_core.api, titan_core.toolkit)
    for module in (one for package in packages for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")):
        found = import_module(module.name)
        yield from (cls for _, cls in inspect.getmembers(found, inspect.isclass) if cls.__module__ == module.name)


def members_of(protocol: type) -> set[str]:
    own = {
        name for cls in protocol.__mro__ if getattr(cls, "_is_protocol", False) and cls is not Protocol for name in vars(cls)
    }
    return {name for name in own if name in ("__call__", "__iter__", "__next__") or not name.startswith("_")}


def test_every_hook_has_a_row() -> None:
    assert set(LIFECYCLE) == {row for row in RETURNS if "." not in row}
    assert set(REGISTRATION_HOOKS) < set(SPECS)


def test_every_reference_of_the_contract_has_a_row() -> None:
    fields_of = [(cls, field) for cls in api_classes() if is_dataclass(cls) for field in fields(cls)]
    references = {f"{cls.__name__}.{field.name}" for cls, field in fields_of if str(field.type).startswith("Ref[")}
    functions = {
        f"{cls.__name__}.{field.name}" for cls, field in fields_of
        if "Callable[" in str(field.type) and (issubclass(cls, Component) or cls in (ModelDefinition, Mixer, WeightFormat))
    }  # fmt: skip
    groups = {str(field.type): f"{cls.__name__}.{field.name}" for cls, field in fields_of if field.type in GROUPS}
    assert len(groups) == len(GROUPS)
    rows = {
        ".".join((groups.get(row.partition(".")[0], row.partition(".")[0]), row.partition(".")[2])) for row in references
    }
    of_parts = {
        "ModelLayout.buffers",
        *(f"ModelPart.{one}" for one in ("batch_transforms", "after_evaluation", "weights_changed")),
    }
    rows |= functions
    inherited = {row for row in rows if row.partition(".")[2] in {f.name for f in fields(Component)}}
    assert (rows | of_parts) - COPIES - inherited == {row for row in RETURNS if "." in row}


def test_every_protocol_and_base_class_of_the_contract_has_its_methods_guarded() -> None:
    protocols = {
        f"{cls.__module__}:{cls.__name__}": members_of(cls) for cls in api_classes()
        if getattr(cls, "_is_protocol", False) and cls.__name__ not in CORES_OWN
    }  # fmt: skip
    bases = {
        f"{cls.__module__}:{cls.__name__}": {name for name in vars(cls) if not name.startswith("_")} for cls in api_classes()
        if inspect.isabstract(cls) and not getattr(cls, "_is_protocol", False) and cls.__name__ not in BASES
    }  # fmt: skip
    guarded = {place: set(rows) for place, rows in OBJECTS.items()}
    expected = protocols | bases
    assert {place: guarded.get(place) for place in expected} == expected


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_function_of_a_component_has_an_owner(kind: type[Component]) -> None:
    values: dict[str, Any] = {"name": "x", "summary": "", "phase": Phase.DATA, "flavors": {}, "package": "", "path": ""}
    known = {field.name for field in fields(kind)}
    component = with_origin(
        kind(**{**{name: value for name, value in values.items() if name in known}, **failing(kind)}), ORIGIN
    )
    for name, value in functions_in(component):
        if isinstance(value, Ref):
            assert value.purpose in RETURNS and value.origin is not None
            value = value.load()
        with pytest.raises(PluginFailure, match=f"plugin 'odd' .*: {kind.kind} 'x': {name} raised StopIteration"):
            value(None)


def failing(kind: type) -> dict[str, Any]:
    """Return a function that fails for each field of ``kind`` that has one."""
    found: dict[str, Any] = {}
    for field in fields(kind):
        if str(field.type).startswith("Ref["):
            found[field.name] = Ref(f"{__name__}:end")
        elif str(field.type).startswith("Callable["):
            found[field.name] = end
        elif field.type in GROUPS:
            group = GROUPS[field.type]
            found[field.name] = group(**failing(group))
    return found


def functions_in(holder: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in fields(holder):
        value = getattr(holder, field.name)
        if field.type in GROUPS:
            yield from functions_in(value, f"{field.name}.")
        elif isinstance(value, Ref) or (callable(value) and not isinstance(value, type)):
            yield f"{prefix}{field.name}", value


ROWS = [row for row in RETURNS if "." in row]


@pytest.mark.parametrize(
    ("row", "failure"),
    [(row, failure) for row in ROWS for failure in FAILURES if not belongs_to(row.partition(".")[2], failure)],
)
def test_a_function_that_fails_names_its_plugin(row: str, failure: str) -> None:
    function = row.partition(".")[2]
    with pytest.raises(PluginFailure, match=f"{NAMED}{function} raised {failure}"):
        ORIGIN.guard_ref(row, FAILURES[failure])()
    for interrupt in (KeyboardInterrupt, Interrupted):  # by a person, or by a signal
        with pytest.raises(interrupt):
            ORIGIN.guard_ref(row, raises(interrupt()))()


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("hook", LIFECYCLE)
def test_a_hook_that_fails_names_its_plugin(hook: str, failure: str) -> None:
    spec = SPECS[hook]
    names = ", ".join(inspect.signature(spec).parameters)
    namespace: dict[str, Any] = {"fails": FAILURES[failure]}
    exec(f"def {hook}(self, {names}): return fails()", namespace)
    observer = type("Observer", (), {hook: hookimpl(namespace[hook])})()
    lifecycle = Lifecycle()
    lifecycle.register(observer, origin=ORIGIN)
    arguments: list[Any] = [Finding("a", "b", 1) if names == "finding" else {} for _ in inspect.signature(spec).parameters]
    call = getattr(lifecycle, hook.removeprefix("titan_"), None)
    if call is None:  # called by the launcher, or for each observer on its own
        of_pluggy = getattr(lifecycle._manager.hook, hook)
        call = lambda *given: of_pluggy(**dict(zip(inspect.signature(spec).parameters, given, strict=True)))  # noqa: E731
    with pytest.raises(PluginFailure, match=f"{NAMED}{hook} raised {failure}"):
        call(*arguments)


class Loss(ObjectiveFunction):
    def __call__(self, *arguments: Any) -> Any:
        return torch.ones(())


def made(place: str) -> Any:
    """Return an object with all members of the class at ``place``."""
    if place.endswith(":ObjectiveFunction"):
        return Loss()
    weight = torch.nn.Parameter(torch.ones(1))
    if place == "torch.optim:Optimizer":
        return torch.optim.SGD([weight])
    if place.endswith(":LRScheduler"):
        return LambdaLR(torch.optim.SGD([weight]), lambda step: 1.0)
    return type("Made", (), dict.fromkeys(OBJECTS[place], end))()


@pytest.mark.parametrize("place", OBJECTS)
def test_a_method_that_fails_names_its_plugin(place: str) -> None:
    for name in OBJECTS[place]:
        for failure, fails in FAILURES.items():
            if belongs_to(name, failure):
                continue
            instance = made(place)
            instance.__class__ = type("Made", (type(instance),), {name: fails})
            guarded_object(ORIGIN, instance, OBJECTS[place], "thing", {})
            with pytest.raises(PluginFailure, match=f"{NAMED}{name} raised {failure}"):
                getattr(type(instance), name)(instance)


@pytest.mark.parametrize("place", OBJECTS)
def test_guarded_objects_remain_what_they_are(place: str) -> None:
    instance = made(place)
    cls, before = type(instance), dict(vars(instance))
    assert guarded_object(ORIGIN, instance, OBJECTS[place], "thing", {}) is instance
    assert isinstance(instance, cls) and type(instance).__name__ == cls.__name__ and vars(instance) == before
    other = Origin("other", "other", "1")
    assert guarded_object(other, instance, OBJECTS[place], "thing", {}) is instance  # keeps its first owner
    if place == "torch.optim:Optimizer":
        schedule = LambdaLR(instance, lambda step: 1.0)  # which replaces the optimizer's ``step``
        instance.step()
        schedule.step()


class Delegates:
    """Has only what another object has."""

    def __getattr__(self, name: str) -> Any:
        if name in ("step_unless",):
            return raises(RuntimeError("late"))
        raise AttributeError(name)


def test_methods_of_an_instance_are_guarded_too() -> None:
    members = OBJECTS["titan_core.api.training.optimizer:SkipsOnDevice"]
    made = guarded_object(ORIGIN, Delegates(), members, "SkipsOnDevice", {})
    with pytest.raises(PluginFailure, match=f"{NAMED}step_unless raised RuntimeError: late"):
        made.step_unless(None)


class Source:
    num_documents: Any = 3

    def shard(self, *_: int) -> Any:
        return iter("abc")


class Bare:
    """Has ``vocab_size`` and no more."""

    vocab_size = 3


class Tokens(TextTokenizer):
    vocab_size = 3

    def encode_document(self, text: str) -> list[int]:
        return [1]

    def decode(self, ids: object) -> Any:
        return b"bytes"


def with_value(cls: type, **values: Any) -> object:
    return type(cls.__name__, (cls,), values)()


NONSENSE: list[tuple[str, Any, str]] = [
    ("ModelDefinition.flops_per_token", float("nan"), "returned nan; it must return a finite number, at least 0"),
    ("ModelDefinition.flops_per_token", float("inf"), "returned inf"),
    ("ModelDefinition.flops_per_token", -1.0, "returned -1.0"),
    ("ModelDefinition.flops_per_token", "many", "returned 'many'"),
    ("ModelDefinition.flops_per_token", True, "returned True"),
    ("ModelDefinition.build", object(), "must return an nn.Module"),
    ("ModelLayout.buffers", [1.0], "must return a tensor"),
    ("Model.define", {"layout": 1}, "must return a ModelDefinition"),
    ("Transform.active", None, "returned None; it must return True or False"),
    ("Transform.apply", [], "must return the ModelPart, or a list of ModelParts"),
    ("Transform.checks.model", ["words"], "found 'words'"),
    ("Transform.planning.choices", {"key": "text"}, "must return a mapping from config keys to lists of values"),
    ("Transform.planning.costs", Costs(kept=float("nan")), "returned kept = nan"),
    ("Transform.planning.costs", Costs(after_update_every=0), "must return after_update_every of at least 1"),
    ("Transform.planning.costs", Costs(pipeline=PipelineCosts(stages=(), rank_of=(), microbatch_size=1, microbatches=1,
                                                              alive=(-1.0,), idle=0.0)), r"returned alive = \(-1.0,\)"),
    ("Transform.steps.runner", Bare(), "has no '__call__'; it must return a StepRunner"),
    ("Transform.steps.observer", Bare, "returned the class Bare; it must return an instance"),
    ("Observer.build", None, "returned None"),
    ("Dataset.build", Bare(), "has no 'num_documents'; it must return a DocumentSource"),
    ("Dataset.build", with_value(Source, num_documents=-1), "num_documents is -1; it must be a whole number, at least 0"),
    ("Dataset.build", with_value(Source, num_documents=1.5), "num_documents is 1.5"),
    ("Dataset.build", with_value(Source, num_documents=property(end)), "num_documents raised StopIteration"),
    ("Dataset.extras", {"tags": "int64"}, "must return a mapping from names to ExtraFields"),
    ("Tokenizer.build", Bare(), "must return a TextTokenizer"),
    ("Tokenizer.build", with_value(Tokens, vocab_size=0), "vocab_size is 0; it must be a whole number, at least 1"),
    ("ModelHub.locate", 3, "must return a str"),
    ("Optimizer.costs", Costs(), "must return OptimizerCosts"),
    ("Optimizer.costs", OptimizerCosts(state_bytes=-1.0, traffic=0.0), "returned state_bytes = -1.0"),
    ("Optimizer.build", Bare(), "must return a Optimizer"),
    ("Objective.build", end, "must return a ObjectiveFunction"),
    ("Objective.frozen", {"training.seed": 1}, r"must return a mapping from keys of \[model\]"),
    ("Objective.build", with_value(Loss, metrics="accuracy"), "metrics is 'accuracy'; it must be a tuple of names"),
    ("LRSchedule.build", 0.1, "must return a LRScheduler"),
    ("Observer.build", Bare, "returned the class Bare; it must return an instance"),
    ("Checkpoint.build", None, "returned None"),
    ("Checkpoint.find_model", "path", "must return a StoredModel"),
    ("Checkpoint.resumes_after", -1, "must be a whole number, at least 0"),
    ("Command.run", None, "returned None; it must return the exit status"),
    ("Launcher.run", True, "returned True; it must return the exit status"),
    ("WeightFormat.tensors", ["w"], "must return a list of ForeignTensor"),
    ("WeightFormat.to_args", {}, "must return the model's arguments"),
    ("WeightFormat.notes", "a note", "must return a list of str"),
    ("WeightFormat.from_args", [], "must return a dict"),
    ("Mixer.divided", None, "must return a function"),
    ("Computed.values", None, "returned None; it must return a tensor of floating-point numbers"),
    ("Computed.values", torch.ones(3, dtype=torch.int64), r"returned a tensor \[3\] of torch.int64; it must return"),
    ("Computed.values", torch.tensor([1.0, float("nan")]), "returned values that are not finite"),
    ("ModelPart.batch_transforms", None, "must return a Batch"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "result", "message"), NONSENSE)
def test_nonsense_is_refused_where_it_enters(row: str, result: Any, message: str) -> None:
    with pytest.raises(PluginFailure, match=f"{NAMED}.*{message}"):
        ORIGIN.guard_ref(row, lambda: result)()


def guarded(row: str, made: object) -> Any:
    return ORIGIN.guard_ref(row, lambda: made)()


class Shard:
    document: Any = None

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self.document

    def state_dict(self) -> Any:
        return [1]

    def load_state_dict(self, state: object) -> None: ...


def shard_of(document: Any) -> Any:
    source = with_value(Source, shard=lambda self, *_: with_value(Shard, document=document))
    return guarded("Dataset.build", source).shard(0, 1, 0)


@pytest.mark.parametrize("document", [None, b"bytes", 3, {"text": "a"}], ids=str)
def test_what_is_no_document_is_refused_instead_of_ending_the_data(document: Any) -> None:
    with pytest.raises(PluginFailure, match=f"{NAMED}__next__ returned .*; a document is a str, an array of token ids or"):
        next(shard_of(document), None)


def test_methods_that_return_nonsense() -> None:
    assert next(shard_of("a text")) == "a text" and next(shard_of(numpy.ones(2))) is not None
    with pytest.raises(PluginFailure, match=r"state_dict returned \[1\]; it must return a dict"):
        shard_of("a text").state_dict()
    with pytest.raises(PluginFailure, match="decode returned b'bytes'; it must return a str"):
        guarded("Tokenizer.build", Tokens()).decode([1])
    objective = guarded("Objective.build", with_value(Loss, __call__=lambda self, *_: torch.ones(2)))
    with pytest.raises(PluginFailure, match=r"__call__ returned a tensor \[2\] of torch.float32; it must return a scalar"):
        objective(None, None, None)


def test_what_transforms_leave_on_a_part_is_guarded() -> None:
    part = ModelPart(torch.nn.Linear(1, 1), layout=None, objective=Loss())  # type: ignore[arg-type]
    part.batch_transforms, part.after_evaluation = (end,), (end,)
    assert guarded("Transform.apply", part) is part
    for name in ("batch_transforms", "after_evaluation"):
        (call,) = getattr(part, name)
        with pytest.raises(PluginFailure, match=f"{NAMED}{name} raised StopIteration"):
            call()
        guarded("Transform.apply", part)
        assert getattr(part, name) == (call,)  # guarded once, so that it remains the same to later transforms


def test_a_stored_model_is_loaded_by_guarded_code() -> None:
    stored = guarded("Checkpoint.find_model", StoredModel("path", {}, load=Ref(f"{__name__}:end")))
    with pytest.raises(PluginFailure, match=f"{NAMED}load raised StopIteration"):
        stored.load.load()()


PLUGIN = """
from titan_core.api import Dataset, Observer, LRSchedule, Ref, hookimpl
api = (2, 0)
class Shard:
    def __iter__(self): return self
    def __next__(self): raise KeyError("text")
    def state_dict(self): return {}
    def load_state_dict(self, state): pass
class Source:
    num_documents = 64
    def shard(self, index, count, epoch): return Shard()
def open_source(context): return Source()
class Watcher:
    answers = {}
    @hookimpl
    def titan_figures(self, record): return self.answers.get("titan_figures")
    @hookimpl
    def titan_save_state(self): return self.answers.get("titan_save_state")
    @hookimpl
    def titan_before_update(self): return self.answers.get("titan_before_update")
def observe(context): return Watcher()
def schedule(context):
    from torch.optim.lr_scheduler import LambdaLR
    return LambdaLR(context.optimizer, lambda step: float("nan"))
@hookimpl
def titan_datasets(): return [Dataset(name="odd", summary="", build=Ref("odd:open_source"))]
@hookimpl
def titan_debuggers(): return [Observer(name="odd", summary="", build=Ref("odd:observe"), active=lambda context: True)]
@hookimpl
def titan_lr_schedules(): return [LRSchedule(name="odd", summary="", build=Ref("odd:schedule"))]
"""
JOBS: dict[str, tuple[dict[str, Any], list[str], int]] = {
    "dataset 'odd': __next__ raised KeyError: 'text'": ({}, ["--training.dataset", "odd"], 1),
    "lr schedule 'odd': set the learning rates [nan": ({}, ["--lr_scheduler.name", "odd"], 2),
    "observer 'odd': titan_figures returned 3": ({"titan_figures": 3}, [], 2),
    "observer 'odd': titan_figures returned 'x': nan": ({"titan_figures": {"x": float("nan")}}, [], 2),
    "observer 'odd': titan_save_state returned ['mine']": ({"titan_save_state": ["mine"]}, [], 2),
    "observer 'odd': titan_before_update returned 1": ({"titan_before_update": 1}, [], 2),
}


@pytest.mark.parametrize("message", JOBS)
def test_a_job_ends_with_one_line(
    message: str, in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, arguments, status = JOBS[message]
    write_distribution(in_tmp / "site", "odd", PLUGIN)
    monkeypatch.syspath_prepend(str(in_tmp / "site"))
    monkeypatch.delitem(sys.modules, "odd", raising=False)
    mine = discover(entry_points_in(in_tmp / "site"))
    registry = Components(Discovery((*INSTALLED.plugins, *mine.plugins), mine.broken))
    monkeypatch.setattr(command_line.Components, "from_installed", lambda: registry)
    import odd  # type: ignore[import-not-found]

    monkeypatch.setattr(odd.Watcher, "answers", answers)
    assert main(["train", "tiny", "--training.steps", "2", *arguments]) == status
    errors = [line for line in capsys.readouterr().err.splitlines() if "warning" not in line]
    (line,) = [line for line in errors if line.startswith("titan: error: ")]
    assert line.startswith("titan: error: plugin 'odd' (odd 1.0): ") and message in line
    assert "Traceback" not in "\n".join(errors)


class Changes:
    """Changes a tensor of the run in step 2."""

    def __init__(self, hook: str, change: Callable[[Any, list[Any]], object]) -> None:
        self.hook, self.change, self.parameters = hook, change, list[Any]()

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        self.parameters = list(run.parts[0].module.parameters())

    @hookimpl
    def titan_gradients_complete(self, step: int) -> None:
        self._apply("titan_gradients_complete", step, None)

    @hookimpl
    def titan_before_update(self, update: Any) -> None:
        self._apply("titan_before_update", update.step, update)

    @hookimpl
    def titan_step_end(self, report: Any) -> None:
        self._apply("titan_step_end", report.step, report)

    def _apply(self, hook: str, step: int, argument: Any) -> None:
        if hook == self.hook and step == 2:
            with torch.no_grad():
                self.change(argument, self.parameters)


CHANGES: dict[str, tuple[str, Callable[[Any, list[Any]], object], str]] = {
    "loss": ("titan_before_update", lambda update, _: update.loss.zero_(), "loss"),
    "a view of the loss": ("titan_step_end", lambda report, _: report.loss.view(1)[0].mul_(2), "loss"),
    "rank losses": ("titan_step_end", lambda report, _: report.rank_losses.add_(1), "(rank_losses|loss)"),
    "norm": ("titan_before_update", lambda update, _: update.grad_norm.mul_(0), "grad_norm"),
    "tokens": ("titan_before_update", lambda update, _: update.microbatches[-1].tokens.fill_(0), "a microbatch"),
    "targets": ("titan_before_update", lambda update, _: update.microbatches[0].targets[0].fill_(1), "a microbatch"),
    "gradient": ("titan_before_update", lambda _, parameters: parameters[3].grad.mul_(2), "a gradient"),
    "other gradient": ("titan_before_update", lambda _, all_: setattr(all_[0], "grad", all_[0].grad * 2), "a gradient"),
    "scaled gradient": ("titan_gradients_complete", lambda _, parameters: parameters[0].grad.mul_(2), "a gradient"),
    "weight": ("titan_step_end", lambda _, parameters: parameters[-1].add_(1), "a weight"),
    "weight with gradients": ("titan_gradients_complete", lambda _, parameters: parameters[0].mul_(2), "a weight"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_observer_that_changes_the_run_is_named(name: str, in_tmp: Path) -> None:
    hook, change, changed = CHANGES[name]
    with pytest.raises(ValueError, match=rf"Changes object .*: {hook} changed {changed}; observers must leave"):
        run_recipe("tiny", TINY, observers=[Changes(hook, change)])


def test_only_who_changed_a_tensor_is_named() -> None:
    lifecycle, weight = Lifecycle(), torch.nn.Parameter(torch.ones(1))
    allowed = Changes("titan_gradients_complete", lambda _, parameters: parameters[0].add_(1))
    innocent = Changes("", lambda *_: None)
    lifecycle.register(innocent, origin=ORIGIN)
    lifecycle.register(allowed, origin=ORIGIN, changes_weights=True)
    lifecycle.register(Changes("", lambda *_: None), origin=ORIGIN)
    lifecycle.watch([weight])
    allowed.parameters = [weight]
    lifecycle.gradients_complete(2)
    assert weight.item() == 2
