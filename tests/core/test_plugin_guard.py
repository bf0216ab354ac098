"""Errors of a plugin's code are reported with the plugin's name; other plugins still work."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from harness.odd_plugin import ORIGIN, TRANSFORM, registry_with
from titan_core.api import RunStopped, UserError, hookimpl
from titan_core.api.config.resolved import Override
from titan_core.cli import main as command_line
from titan_core.cli.main import main
from titan_core.config.load import load_config
from titan_core.job.assemble import assemble
from titan_core.plugins.guard import Origin
from titan_core.plugins.lifecycle import Lifecycle
from titan_core.toolkit.arguments import parse_overrides
from titan_core.toolkit.errors import PluginFailure

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
        ("titan_parallelisms", "yes", ", check=Ref('odd:words')", "check returned ['all is well']"),
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


@pytest.mark.parametrize(("component", "advised"), [("transform 'odd'", True), ("", True), ("model 'odd'", False)])
def test_only_what_a_job_can_do_without_is_to_be_switched_off(component: str, advised: bool) -> None:
    error = str(Origin("odd", "titan-odd", "1.0", component).failure("raised"))
    assert ("switch the plugin off" in error) is advised and "fix or update titan-odd" in error


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
        ORIGIN.call("titan_step_start", stop, 1)
    assert caught.value is error


def test_the_path_of_a_model_is_the_users() -> None:
    def find(path: str) -> None:
        Path(path, "checkpoint").read_text()

    with pytest.raises(NotADirectoryError):
        ORIGIN.call("find_model", find, __file__)
