"""What a plugin's code raises or wrongly returns is refused, with the plugin's name where the code does not name itself."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.guarded import LIFECYCLE, NAMED, SPECS, Loss, end, raises
from harness.odd_plugin import INSTALLED, ORIGIN, registry_with
from titan_core.api import (
    Costs,
    Finding,
    ModelPart,
    Observer,
    OptimizerCosts,
    PipelineCosts,
    Problem,
    Ref,
    TextTokenizer,
    UserError,
    hookimpl,
)
from titan_core.api.parallel.model_part import require_scalar
from titan_core.cli import main as command_line
from titan_core.data.buffered_shuffle import BufferedShuffle
from titan_core.model.part_guard import PartGuard
from titan_core.plugins.guard import named
from titan_core.plugins.lifecycle import Lifecycle
from titan_core.plugins.registry import Components
from titan_core.toolkit.errors import Interrupted, PluginFailure
from titan_core.toolkit.reading import DocumentReader, ReadPolicy
from titan_core.toolkit.stream_check import require_document
from titan_testing.tiny import define
from titan_testing.tiny_args import TinyArgs


class Odd(BaseException):
    """An exception of a stranger."""


FAILURES: dict[str, Callable[..., Any]] = {
    "RuntimeError: odd": raises(RuntimeError("odd")),
    "SystemExit: 3": raises(SystemExit(3)),
    "Odd: odd": raises(Odd("odd")),
    "StopIteration": end,
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_function_that_fails_names_its_plugin(failure: str) -> None:
    with pytest.raises(PluginFailure, match=f"{NAMED}build raised {failure}"):
        ORIGIN.call("build", FAILURES[failure])
    for interrupt in (KeyboardInterrupt, Interrupted):  # by a person, or by a signal
        with pytest.raises(interrupt):
            ORIGIN.call("build", raises(interrupt()))


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("hook", LIFECYCLE)
def test_a_hook_that_fails_names_its_plugin(hook: str, failure: str) -> None:
    names = ", ".join(inspect.signature(SPECS[hook]).parameters)
    namespace: dict[str, Any] = {"fails": FAILURES[failure]}
    exec(f"def {hook}(self, {names}): return fails()", namespace)
    observer = type("Observer", (), {hook: hookimpl(namespace[hook])})()
    lifecycle = Lifecycle()
    lifecycle.register(observer, origin=ORIGIN)
    parameters = inspect.signature(SPECS[hook]).parameters
    arguments: list[Any] = [Finding("a", "b", 1) if names == "finding" else {} for _ in parameters]
    call = getattr(lifecycle, hook.removeprefix("titan_"), None)
    if call is None:  # called by the launcher, or for each observer on its own
        of_pluggy = getattr(lifecycle._manager.hook, hook)
        call = lambda *given: of_pluggy(**dict(zip(parameters, given, strict=True)))  # noqa: E731
    with pytest.raises(PluginFailure, match=f"{NAMED}{hook} raised {failure}"):
        call(*arguments)


class Tokens(TextTokenizer):
    vocab_size = 3

    def encode_document(self, text: str) -> list[int]:
        return [1]

    def decode(self, ids: object) -> Any:
        return b"bytes"


def late() -> Any:
    yield Problem("a", "b")
    raise KeyError("late")


RESULTS: list[tuple[Any, Any, str]] = [
    (TextTokenizer, None, "returned None; it must return a TextTokenizer"),
    (TextTokenizer, Tokens, "returned <class .*Tokens'>; it must return a TextTokenizer"),
    (int, True, "returned True; it must return a int"),
    (dict, [], r"returned \[\]; it must return a dict"),
    ([Problem], None, "returned None; it must return or yield Problems"),
    ([Problem], "all is well", "returned 'all is well'; it must return or yield Problems"),
    ([Problem], ["words"], r"returned \['words'\]; it must return or yield Problems"),
    ([Problem], late(), "raised KeyError: 'late'"),
]


@pytest.mark.parametrize(("kind", "result", "message"), RESULTS, ids=[message for *_, message in RESULTS])
def test_a_result_of_another_class_is_refused(kind: Any, result: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.guarded.end", lambda: result)
    ref: Ref[Any] = Ref("harness.guarded:end", origin=ORIGIN, purpose="build")
    with pytest.raises(PluginFailure, match=f"{NAMED}build {message}"):
        ref.call_list(kind[0]) if isinstance(kind, list) else ref.call(kind)


def pipeline(**changed: Any) -> PipelineCosts:
    figures: dict[str, Any] = {"microbatch_size": 1, "microbatches": 1, "alive": (1.0,), "idle": 0.0}
    return PipelineCosts(stages=(), rank_of=(), **{**figures, **changed})


VALUES: list[tuple[Callable[[], object], str]] = [
    (lambda: replace(define(TinyArgs()), num_params=0), "num_params = 0; it must be a whole number, at least 1"),
    (
        lambda: replace(define(TinyArgs()), num_active_params=10**9),
        "num_active_params = 1000000000; .* from 1 to num_params",
    ),
    (lambda: replace(define(TinyArgs()), num_active_params=True), "num_active_params = True"),
    (lambda: replace(define(TinyArgs()).layout, dim="8"), "dim = '8'; it must be a whole number"),
    (lambda: replace(define(TinyArgs()).layout, exact="*.w"), "exact = '\\*.w'; it must be a tuple of patterns"),
    (lambda: replace(define(TinyArgs()).layout, routers={"*": 2}), "routers = .* it must map patterns to Routers"),
    (lambda: replace(define(TinyArgs()).layout, block_costs=(float("nan"),)), "block_costs = .* must be finite"),
    (lambda: replace(define(TinyArgs()).layout, statistics={"rows": [4, 8]}), "statistics = .* it must map names"),
    (lambda: replace(define(TinyArgs()).layout, statistics={"rows": (4, 0)}), "whole numbers, at least 1"),
    (lambda: replace(define(TinyArgs()).layout, statistics={"of experts": (4,)}), "a word of letters"),
    (lambda: replace(define(TinyArgs()).layout, statistics=("rows",)), "statistics = "),
    (lambda: Costs(host_waits=float("nan")), "host_waits = nan; it must be finite"),
    (lambda: Costs(after_update_every=0), "after_update_every = 0; it must be at least 1"),
    (lambda: pipeline(alive=(-1.0,)), r"alive = \(-1.0,\)"),
    (lambda: OptimizerCosts(state_bytes=-1.0), "state_bytes = -1.0"),
    *[(lambda value=value: require_document(value), "is no document: a str, an array") for value in (None, b"a", 3, {})],  # type: ignore[misc]
    *[
        (lambda value=value: require_scalar(value, Loss()), "harness.guarded.Loss: returned .* must return a scalar")  # type: ignore[misc]
        for value in (None, 1.0, torch.ones(1), torch.ones((), dtype=torch.int64))
    ],
]


@pytest.mark.parametrize(("make", "message"), VALUES)
def test_values_that_cannot_be_right_are_refused_where_they_enter(make: Callable[[], object], message: str) -> None:
    with pytest.raises((ValueError, TypeError, UserError), match=message):
        make()


class Shard:
    """Has documents ``a`` and ``None``, and says where it stands until it has read the first."""

    def __init__(self, fails: bool = False) -> None:
        self.documents, self.fails = ["a", None], fails

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self.documents.pop(0)

    def state_dict(self) -> Any:
        return end() if self.fails and len(self.documents) < 2 else {"left": len(self.documents)}

    def load_state_dict(self, state: object) -> None: ...


def test_neither_none_nor_a_failing_position_ends_the_data() -> None:
    reader, shard = DocumentReader(ReadPolicy(), "mine"), Shard()
    assert reader.next(shard) == "a"
    with pytest.raises(TypeError, match="None is no document"):
        reader.next(shard)
    with pytest.raises(TypeError, match="None is no document"):
        next(BufferedShuffle(Shard(), 3, (1,)))
    shuffled = BufferedShuffle(Shard(fails=True), 1, (1,))
    assert next(shuffled) == "a"
    with pytest.raises(RuntimeError, match="state_dict raised StopIteration"):
        next(shuffled)


def part_with(**settings: Any) -> ModelPart:
    return ModelPart(torch.nn.Linear(1, 1), define(TinyArgs()).layout, Loss(), **settings)


LEFT: list[tuple[str, Any, str]] = [
    ("copies", {"nowhere": "weight"}, "apply left copies = .*; they must name parameters of the part"),
    ("objective", None, "apply left objective = None; it must be an ObjectiveFunction"),
    ("statistics", {"rows": [4]}, "apply left statistics = "),
]


@pytest.mark.parametrize(("name", "value", "message"), LEFT)
def test_what_a_transform_leaves_on_a_part_is_checked(name: str, value: Any, message: str) -> None:
    def apply(part: ModelPart) -> Any:
        setattr(part, name, value)
        return part

    guard = PartGuard(Components(INSTALLED))
    with pytest.raises(UserError, match=f"transform 'odd': {message}"):
        guard.apply("odd", apply, part_with())
    for result in (None, []):
        with pytest.raises(UserError, match=r"transform 'odd': apply returned .*; it must return the ModelPart"):
            guard.apply("odd", lambda part, result=result: result, part_with())  # type: ignore[misc]


def test_what_is_no_batch_is_refused() -> None:
    batch: Any = None
    with pytest.raises(UserError, match="returned None, no Batch"):
        part_with(batch_transforms=(lambda batch: batch,)).transformed(batch)


FAULTS = {
    "raise KeyError('x')": "raised KeyError: 'x'",
    "raise SystemExit(0)": "raised SystemExit: 0",
    "return torch.ones(1) @ torch.ones(2, 2, 2)": "raised RuntimeError: ",
    "return Problem()": "raised TypeError: ",
    "return UserError()": "raised ValueError: ",  # in the core, which the plugin calls
}
NO_FAULTS = ("MemoryError", "UserError.one('a', 'b')", "RunStopped('enough')", "KeyboardInterrupt", "StepAbandoned")
CHECKPOINT = """
import torch
class Store:
    def save(self):
        {body}
@hookimpl
def titan_checkpoints(): return [Checkpoint(name='odd', summary='', find_model=Ref('odd:find'))]
"""


@pytest.mark.parametrize("body", [*FAULTS, *(f"raise {error}" for error in NO_FAULTS)])
def test_an_error_in_a_method_names_the_plugin_whose_code_raised_it(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = registry_with(tmp_path, CHECKPOINT.format(body=body), monkeypatch)
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - of any type
        importlib.import_module("odd").Store().save()
    found = named(caught.value, registry)
    if body not in FAULTS:
        assert found is caught.value
        return
    assert isinstance(found, PluginFailure) and found.__cause__ is caught.value
    assert found.problems[0].where == "plugin 'odd' (odd 1.0): checkpoint 'odd'"
    assert found.problems[0].why.startswith("Store.save (odd, line ") and FAULTS[body] in found.problems[0].why


WRAPPER = """
class Wraps:
    @hookimpl(wrapper=True)
    def titan_step_start(self, step): return (yield)
@hookimpl
def titan_debuggers(): return [Observer(name='odd', summary='', build=Ref('odd:Wraps'), active=yes)]
"""


def test_an_error_that_passes_through_a_plugins_wrapper_is_not_its_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Callers:
        @hookimpl
        def titan_step_start(self, step: int) -> None:
            raise KeyError("mine") from ValueError("a cause")

    registry = registry_with(tmp_path, WRAPPER, monkeypatch)
    lifecycle = Lifecycle([Callers()])
    (odd,) = (one for one in registry.all(Observer) if one.name == "odd")
    lifecycle.register(importlib.import_module("odd").Wraps(), origin=registry.origin(odd))
    with pytest.raises(KeyError, match="mine") as caught:
        lifecycle.step_start(1)
    assert named(caught.value, registry) is caught.value and isinstance(caught.value.__cause__, ValueError)


def test_a_command_names_the_plugin_that_failed_and_may_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "".join(
        f"def {name}(invocation): {body}\n"
        for name, body in {"fails": "raise KeyError('x')", "exits": "raise SystemExit(3)"}.items()
    )
    names = ("fails", "exits", "nothing", "absent")
    commands = ", ".join(f"Command(name='{name}', summary='', run=Ref('odd:{name}'))" for name in names)
    hook = f"@hookimpl\ndef titan_commands(): return [{commands}]\n"
    registry = registry_with(tmp_path, source + hook, monkeypatch)
    monkeypatch.setattr(command_line.Components, "from_installed", lambda: registry)
    with pytest.raises(SystemExit):
        command_line.main(["exits"])
    failures = {
        "fails": ": fails (odd, line ",
        "nothing": ": command 'nothing': run returned None; it must return the exit status",
        "absent": ": command 'absent': run = 'odd:absent': 'odd' has no attribute 'absent'",
    }
    for name, message in failures.items():
        assert command_line.main([name]) == (1 if name == "fails" else 2)
        assert f"titan: error: plugin 'odd' (odd 1.0){message}" in capsys.readouterr().err


def test_an_error_of_the_core_names_no_plugin() -> None:
    with pytest.raises(ValueError, match="at least one problem") as caught:
        UserError()
    assert named(caught.value, Components(INSTALLED)) is caught.value
