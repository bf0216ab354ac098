"""Errors and wrong results of a plugin's code are reported with the plugin's name; other plugins still work."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from harness.distributions import entry_points_in, write_distribution
from titan_core.api import (
    Computed,
    Mixer,
    Model,
    ModelDefinition,
    ModelLayout,
    Problem,
    Ref,
    RunStopped,
    UserError,
    hookimpl,
)
from titan_core.api.config.resolved import Override
from titan_core.cli import main as command_line
from titan_core.cli.main import main
from titan_core.config.load import load_config
from titan_core.job.assemble import assemble
from titan_core.plugins.component_checks import GROUPS, RULES, components_from
from titan_core.plugins.discovery import REGISTRATION_HOOKS, discover
from titan_core.plugins.guard import Origin
from titan_core.plugins.lifecycle import Lifecycle
from titan_core.plugins.registry import Components
from titan_core.plugins.results import RETURNS
from titan_core.toolkit.arguments import parse_overrides
from titan_core.toolkit.errors import PluginFailure

INSTALLED = discover()
ORIGIN = Origin("odd", "titan-odd", "1.2", "transform 'odd'")

HEAD = """
from typing import Any, ClassVar
from pydantic import BaseModel, Field, field_validator
from titan_core.api import *
api = (2, 0)
def raises(*a): raise ZeroDivisionError("odd")
def leaves(*a): import sys; sys.exit(4)
def refuses(*a): raise UserError.one("odd", "not today")
def yields(*a):
    yield Problem("odd", "first")
    raise KeyError("late")
def nothing(*a): return None
def yes(*a): return True
def three(*a): return 3
def text(*a): return "all is well"
def words(*a): return ["all is well"]
number = 3
class Args(BaseModel):
    dim: int = 8
class Own(Section):
    section: ClassVar[str] = "odd_section"
    key: int = 1
"""


def registry_with(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch, name: str = "odd") -> Components:
    """Return the registry of all installed plugins and of a plugin with ``source``."""
    write_distribution(folder, name, HEAD + source)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)
    found = discover(entry_points_in(folder))
    return Components(
        type(found)(INSTALLED.plugins + found.plugins, INSTALLED.broken + found.broken, INSTALLED.disabled + found.disabled)
    )


TRANSFORM = "Transform(name='odd', summary='', phase=Phase.DATA, apply=Ref('odd:raises'), active={active}{more})"
KIND_OF = {
    "titan_parallelisms": TRANSFORM,
    "titan_debuggers": "Observer(name='odd', summary='', build=Ref('odd:raises'), active={active}{more})",
    "titan_metric_loggers": "Observer(name='odd', summary='', build=Ref('odd:raises'), active={active}{more})",
    "titan_checkpoints": "Checkpoint(name='odd', summary='', build=Ref('odd:raises'), active={active})",
    "titan_models": "Model(name='odd', summary='', flavors=dict(one=Args()), define=Ref('odd:{active}'))",
    "titan_tokenizers": "Tokenizer(name='odd', summary='', build=Ref('odd:{active}'))",
    "titan_datasets": "Dataset(name='odd', summary='', build=Ref('odd:raises'), check=Ref('odd:{active}'))",
}
SELECT = {
    "titan_models": ["--model.name", "odd", "--model.flavor", "one"],
    "titan_tokenizers": ["--model.tokenizer", "odd"],
    "titan_datasets": ["--training.dataset", "odd"],
}
RAISED = "raised ZeroDivisionError: odd"


@pytest.mark.parametrize(
    ("hook", "active", "more", "message"),
    [
        *[(hook, "raises", "", RAISED) for hook in KIND_OF],
        *[(hook, "leaves", "", "raised SystemExit: 4") for hook in KIND_OF],
        *[(hook, "nothing", "", "returned None; it must return") for hook in KIND_OF],
        *[(hook, "three", "", "returned 3; it must return") for hook in KIND_OF if hook != "titan_tokenizers"],
        ("titan_parallelisms", "yes", ", check=Ref('odd:raises')", "check " + RAISED),
        ("titan_parallelisms", "yes", ", check=Ref('odd:yields')", "check raised KeyError: 'late'"),
        ("titan_parallelisms", "yes", ", check=Ref('odd:nothing')", "check returned None; it must return or yield Problems"),
        ("titan_parallelisms", "yes", ", check=Ref('odd:text')", "check returned 'all is well'; it must return or yield"),
        ("titan_parallelisms", "yes", ", check=Ref('odd:words')", "check found 'all is well'"),
        ("titan_parallelisms", "yes", ", check=Ref('odd:missing')", "'odd' has no attribute 'missing'"),
        ("titan_parallelisms", "yes", ", check=Ref('odd:number')", "check = 'odd:number' is not a function, but int"),
        ("titan_parallelisms", "yes", ", check=Ref('nowhere.at.all:f')", "importing 'nowhere.at.all' raised"),
        ("titan_debuggers", "yes", ", check=Ref('odd:raises')", "check " + RAISED),
        ("titan_metric_loggers", "yes", ", check=Ref('odd:raises')", "check " + RAISED),
    ],
)
def test_assembly_names_the_plugin_whose_code_fails(
    hook: str, active: str, more: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    component = KIND_OF[hook].format(active=active, more=more)
    registry = registry_with(tmp_path, f"@hookimpl\ndef {hook}(): return [{component}]\n", monkeypatch)
    assert not registry.found.broken
    overrides = parse_overrides(SELECT.get(hook, []))
    with pytest.raises(UserError) as caught:
        assemble(*load_config("tiny", overrides, registry))
    (problem,) = [problem for problem in caught.value.problems if message in str(problem)]
    assert "plugin 'odd' (odd 1.0)" in str(problem)
    # Without the plugin the job assembles.
    off = [Override("plugins.disable", "['odd']")]
    assemble(*load_config("tiny", off, registry))


def test_what_a_plugin_raises_for_users_passes_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    component = TRANSFORM.format(active="refuses", more="")
    registry = registry_with(tmp_path, f"@hookimpl\ndef titan_parallelisms(): return [{component}]\n", monkeypatch)
    with pytest.raises(UserError) as caught:
        assemble(*load_config("tiny", [], registry))
    assert str(caught.value) == "odd: not today" and not isinstance(caught.value, PluginFailure)


def test_the_command_line_prints_one_line_and_lists_the_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    component = TRANSFORM.format(active="raises", more="")
    registry = registry_with(tmp_path, f"@hookimpl\ndef titan_parallelisms(): return [{component}]\n", monkeypatch)
    monkeypatch.setattr(command_line.Components, "from_installed", lambda: registry)
    assert main(["config", "check", "tiny"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("titan: error: plugin 'odd' (odd 1.0): transform 'odd': active raised ZeroDivisionError: odd; ")
    assert '[plugins] disable = ["odd"]' in line and "TITAN_TRACEBACK=1" in line
    assert main(["plugins"]) == 0 and "odd 1.0" in capsys.readouterr().out
    monkeypatch.setenv("TITAN_TRACEBACK", "1")
    with pytest.raises(PluginFailure) as caught:
        main(["config", "check", "tiny"])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    "field", ["apply", "checks.hardware", "build", "steps.runner", "steps.observer", "define", "arguments"]
)
def test_every_reference_of_a_component_is_guarded(field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
@hookimpl
def titan_parallelisms(): return [Transform(name='odd', summary='', phase=Phase.DATA, apply=Ref('odd:raises'), active=yes,
    checks=Checks(hardware=Ref('odd:raises')), steps=StepUse(runner=Ref('odd:raises'), observer=Ref('odd:raises')))]
@hookimpl
def titan_models(): return [Model(name='odd', summary='', flavors=dict(one=Args()), define=Ref('odd:raises'))]
@hookimpl
def titan_optimizers(): return [Optimizer(name='odd', summary='', build=Ref('odd:raises'))]
@hookimpl
def titan_datasets(): return [Dataset(name='odd', summary='', build=Ref('odd:raises'))]
@hookimpl
def titan_commands(): return [Command(name='odd', summary='', run=Ref('odd:raises'), arguments=Ref('odd:raises'))]
"""
    registry = registry_with(tmp_path, source, monkeypatch)
    plugin = next(plugin for plugin in registry.found.plugins if plugin.name == "odd")
    name = field.rpartition(".")[2]
    groups = [getattr(component, field.rpartition(".")[0], component) for component in plugin.components]
    holders = [group for group in groups if getattr(group, name, None) is not None]
    assert holders
    for holder in holders:
        with pytest.raises(PluginFailure, match=rf"plugin 'odd' \(odd 1.0\): .*'odd': {field} raised ZeroDivisionError"):
            getattr(holder, name).load()()


BAD = {
    "None": "None",
    "'llama'": "'llama'; return a list of Models",
    "{'a': 1}": "{'a': 1}; return a list of Models",
    "3": "3; return a list of Models",
    "[None]": "None, which is not a Model",
    "Model(name='m', summary='', flavors=dict(one=Args()), define=Ref('a:b'))": "one Model; return a list",
    "[Model(name='', summary='', flavors=dict(one=Args()), define=Ref('a:b'))]": "whose name is empty",
    "[Model(name='m', summary='', flavors=dict(one=Args()), define=Ref('a:b'), training_only=3)]": "is 3, not a Mapping",
    "[Model(name=' m', summary='', flavors=dict(one=Args()), define=Ref('a:b'))]": "is not one line of",
    "[Model(name='m' * 1000, summary='', flavors=dict(one=Args()), define=Ref('a:b'))]": "is not one line of",
    "[Model(name='m\\n', summary='', flavors=dict(one=Args()), define=Ref('a:b'))]": "is not one line of",
    "[Model(name=3, summary='', flavors=dict(one=Args()), define=Ref('a:b'))]": "whose name is 3, not a str",
    "[Model(name='m', summary=None, flavors=dict(one=Args()), define=Ref('a:b'))]": "whose summary is None, not a str",
    "[Model(name='m', summary='', flavors={}, define=Ref('a:b'))]": "flavors is empty",
    "[Model(name='m', summary='', flavors=[Args()], define=Ref('a:b'))]": "not a mapping",
    "[Model(name='m', summary='', flavors=dict(one=Args), define=Ref('a:b'))]": "the class Args for 'one'",
    "[Model(name='m', summary='', flavors=dict(one=dict(dim=1)), define=Ref('a:b'))]": "must be a pydantic model",
    "[Model(name='m', summary='', flavors=dict(a=Args(), b=Own()), define=Ref('a:b'))]": "several classes: Args, Own",
    "[Model(name='m', summary='', flavors={3: Args()}, define=Ref('a:b'))]": "a flavor named 3",
    "[Model(name='m', summary='', flavors=dict(one=Args()), define=raises)]": "not a Ref: write Ref(",
    "[Model(name='m', summary='', flavors=dict(one=Args()), define='a:b')]": "'a:b', not a Ref",
    "[Model(name='m', summary='', flavors=dict(one=Args()), define=Ref('a:b'), formats=3)]": "not a tuple of WeightFormat",
    "[Model(name='m', summary='', flavors=dict(one=Args()), define=Ref('a:b'), config=Args)]": "not a subclass of Section",
    "[Model(name='m', summary='', flavors=dict(one=Args()), define=Ref('nonsense'))]": "a Ref is written",
    "leaves()": "raised SystemExit",
    "(1 / 0 for _ in [1])": "raised ZeroDivisionError",
}


@pytest.mark.parametrize("returned", BAD)
def test_what_a_registration_hook_must_not_return(returned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = registry_with(tmp_path, f"@hookimpl\ndef titan_models(): return {returned}\n", monkeypatch)
    (broken,) = [plugin for plugin in registry.found.broken if plugin.name == "odd"]
    assert "hook titan_models " in broken.reason and BAD[returned] in broken.reason
    assemble(*load_config("tiny", [], registry))  # which does not need it


@pytest.mark.parametrize("hook", REGISTRATION_HOOKS)
def test_no_hook_may_return_none(hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = registry_with(tmp_path, f"@hookimpl\ndef {hook}(): pass\n", monkeypatch)
    (broken,) = [plugin for plugin in registry.found.broken if plugin.name == "odd"]
    assert f"hook {hook} returned None; return a list of " in broken.reason


@pytest.mark.parametrize(
    ("component", "reason"),
    [
        (TRANSFORM.format(active="Ref('odd:yes')", more=""), "whose active is a Ref; it must be a plain function"),
        (TRANSFORM.format(active="True", more=""), "whose active is True, not a function"),
        (
            TRANSFORM.format(active="yes", more=", mesh=MeshUse(sums='fsdp')"),
            "whose mesh.sums is 'fsdp', not a tuple of str",
        ),
        (TRANSFORM.format(active="yes", more=", serves=(1,)"), "whose serves contains 1, not a str"),
        (TRANSFORM.format(active="yes", more=", mesh=MeshUse(dims=('x',))"), "whose mesh.dims contains 'x', not a MeshDim"),
        (TRANSFORM.format(active="yes", more="").replace("Phase.DATA", "7"), "whose phase is 7, not a Phase"),
    ],
)
def test_fields_of_the_wrong_type(component: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = registry_with(tmp_path, f"@hookimpl\ndef titan_parallelisms(): return [{component}]\n", monkeypatch)
    (broken,) = [plugin for plugin in registry.found.broken if plugin.name == "odd"]
    assert reason in broken.reason


def test_every_field_of_every_component_has_a_rule() -> None:
    for kind in REGISTRATION_HOOKS.values():
        for field in fields(kind):
            known = field.type in GROUPS or any(str(field.type).startswith(start) for start in RULES)
            assert known, f"{kind.__name__}.{field.name}: {field.type}"


def test_an_endless_hook_ends() -> None:
    def endless() -> Iterator[None]:
        while True:
            yield None

    with pytest.raises(Exception, match="more than 10000 components"):
        components_from("titan_models", Model, endless())


NAMED = "    section: ClassVar[str] = 's'\n"
SECTIONS = {
    "    key: int = 1": "needs a section name",
    "    section: ClassVar[str] = ''\n    key: int = 1": "needs a section name",
    "    section: ClassVar[str] = 'a b'\n    key: int = 1": "needs a section name",
    NAMED + "    key: int": "a key without a default: key",
    NAMED + "    key: int = 'x'": "rejects its own default: key",
    NAMED + "    key: float = float('inf')": "rejects its own default: key",
    NAMED + "    key: object() = 1": "odd",
    NAMED + "    key: Observer = None": "S cannot be instantiated",
    NAMED + "    key: 'Undefined' = None": "S cannot be instantiated: PydanticUserError: `S` is not fully",
    NAMED + "    key: str = Field(default='a', min_length='x')": "odd",
    NAMED + "    key: list = Field(default_factory=raises)": "S cannot be instantiated",
}


@pytest.mark.parametrize("source", SECTIONS)
def test_a_section_that_cannot_work_breaks_its_plugin_alone(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    component = TRANSFORM.format(active="yes", more=", config=S")
    hook = f"class Observer: pass\nclass S(Section):\n{source}\n@hookimpl\ndef titan_parallelisms(): return [{component}]\n"
    registry = registry_with(tmp_path, hook, monkeypatch)
    (broken,) = [plugin for plugin in registry.found.broken if plugin.name == "odd"]
    assert SECTIONS[source] in broken.reason
    assemble(*load_config("tiny", [], registry))


def test_a_validator_that_raises_names_its_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
class S(Section):
    section: ClassVar[str] = "s"
    key: int = 1
    @field_validator("key")
    @classmethod
    def _odd(cls, value): return {1: 1}[value]
@hookimpl
def titan_parallelisms(): return [Transform(name='odd', summary='', phase=Phase.DATA, apply=Ref('odd:yes'), active=yes,
    config=S)]
"""
    registry = registry_with(tmp_path, source, monkeypatch)
    with pytest.raises(PluginFailure, match=r"plugin 'odd' \(odd 1.0\): section \[s\] raised KeyError: 2"):
        load_config("tiny", [Override("s.key", "2")], registry)


class Observer:
    @hookimpl
    def titan_step_start(self, step: int) -> None:
        raise ZeroDivisionError("in a hook")


class Wrapping:
    """Raises before or after the wrapped hooks, or lets their errors pass."""

    def __init__(self, when: str) -> None:
        self.when = when

    @hookimpl(wrapper=True)
    def titan_step_start(self, step: int) -> Generator[None, Any, Any]:
        if self.when == "before":
            raise ZeroDivisionError("before")
        result = yield
        if self.when == "after":
            raise ZeroDivisionError("after")
        return result


def test_a_lifecycle_hook_that_raises_names_its_plugin() -> None:
    lifecycle = Lifecycle()
    lifecycle.register(Observer(), origin=ORIGIN)
    with pytest.raises(
        PluginFailure, match=r"plugin 'odd' \(titan-odd 1.2\): .*: titan_step_start raised ZeroDivisionError"
    ):
        lifecycle.step_start(1)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_wrapper_names_its_plugin(when: str) -> None:
    lifecycle = Lifecycle()
    lifecycle.register(Wrapping(when), origin=ORIGIN)
    with pytest.raises(PluginFailure, match=f"titan_step_start raised ZeroDivisionError: {when}"):
        lifecycle.step_start(1)


def test_errors_that_pass_through_a_wrapper_are_not_its_failures() -> None:
    lifecycle = Lifecycle()
    lifecycle.register(Observer())
    lifecycle.register(Wrapping("never"), origin=ORIGIN)
    with pytest.raises(ZeroDivisionError, match="in a hook"):
        lifecycle.step_start(1)


@pytest.mark.parametrize("error", [UserError.one("a", "b"), RunStopped("enough"), KeyboardInterrupt()])
def test_errors_that_observers_raise_on_purpose_pass(error: BaseException) -> None:
    def stop(step: int) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        ORIGIN.guard("titan_step_start", stop)(1)
    assert caught.value is error


@pytest.mark.parametrize("error", [SystemExit(3), BrokenPipeError(), OSError(36, "File name too long", "a" * 300)])
def test_a_command_may_exit_and_its_files_are_the_users(error: BaseException) -> None:
    def stop() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        ORIGIN.guard("run", stop)()
    assert caught.value is error
    if not isinstance(error, BrokenPipeError):
        with pytest.raises(PluginFailure):
            ORIGIN.guard("build", stop)()


def test_the_path_of_a_model_is_the_users() -> None:
    def find(path: str) -> None:
        Path(path, "checkpoint").read_text()

    with pytest.raises(NotADirectoryError):
        ORIGIN.guard("find_model", find)(__file__)


def definition(**changed: Any) -> ModelDefinition:
    """Return a definition whose functions fail."""

    def fails(*_: object) -> Any:
        raise ZeroDivisionError

    layout = ModelLayout(
        num_blocks=1, dim=1, vocab_size=1, max_seq_len=1, embedding=(), blocks="blocks", head=(), buffers={"*": fails},
        mixers={"m": Mixer(kind="odd", divided=Ref("odd:raises"))}, parameters={"p": Computed(Ref("odd:raises"))},
    )  # fmt: skip
    made = ModelDefinition(layout=layout, build=fails, num_params=1, flops_per_token=fails)
    of_layout = {name: value for name, value in changed.items() if name in ModelLayout.__dataclass_fields__}
    own = {name: value for name, value in changed.items() if name not in of_layout}
    return replace(made, layout=replace(layout, **of_layout), **own)


def test_a_definition_is_guarded_too() -> None:
    made = RETURNS["Model.define"](ORIGIN, definition())
    divided = made.layout.mixers["m"].divided
    assert divided.origin is ORIGIN and made.layout.parameters["p"].values.origin is ORIGIN
    for call in (made.build, lambda: made.flops_per_token(3), made.layout.buffers["*"]):
        with pytest.raises(PluginFailure, match="plugin 'odd'"):
            call()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"exact": "*.router.weight"}, "returned exact = '\\*.router.weight'; it must be a tuple of patterns"),
        ({"num_params": 7, "num_active_params": 8}, "returned num_active_params = 8; .* from 1 to num_params = 7"),
        ({"num_active_params": True}, "returned num_active_params = True"),
        ({"statistics": {"rows": [4, 8]}}, r"returned statistics = \{'rows': \[4, 8\]\}; it must map names"),
        ({"statistics": {"rows": (4, 0)}}, "returned statistics = .* tuples of whole numbers, at least 1"),
        ({"statistics": {"rows of experts": (4,)}}, "returned statistics = .* a word of letters"),
        ({"statistics": ("rows",)}, "returned statistics = "),
        ({"routers": {"*.router": 2}}, "returned routers = .* it must map patterns to Routers"),
    ],
    ids=str,
)
def test_what_a_definition_says_of_its_parameters_is_checked(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginFailure, match=message):
        ORIGIN.call("define", lambda: definition(**changed), (), RETURNS["Model.define"])


def test_problems_come_back_as_a_list() -> None:
    found = ORIGIN.call("check", lambda: (Problem("a", "b") for _ in range(2)), (), RETURNS["Transform.check"])
    assert [str(problem) for problem in found] == ["a: b", "a: b"]
