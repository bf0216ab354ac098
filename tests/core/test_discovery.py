"""Discovery: a broken plugin is reported and affects no other."""

from __future__ import annotations

import sys
import threading
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from harness.distributions import entry_points_in, write_distribution
from titan_core.api import API_VERSION, Dataset, Model, UserError
from titan_core.api.config.resolved import Override
from titan_core.cli import main as command_line
from titan_core.cli.main import main
from titan_core.config.load import load_config
from titan_core.job.assemble import assemble
from titan_core.plugins import discovery
from titan_core.plugins.discovery import Discovery, discover
from titan_core.plugins.registry import Components

INSTALLED = discover()

GOOD = """
from titan_core.api import Dataset, Ref, hookimpl
api = (1, 0)
@hookimpl
def titan_datasets():
    return [Dataset(name={name!r}, summary="made up", build=Ref("nowhere:at_all"))]
"""

PROVIDED = ".".join(map(str, API_VERSION))
HEAD = "from titan_core.api.hookspecs import hookimpl\napi = (1, 0)\n"


def found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Discovery:
    """Return what discovery finds in ``folder``, whose modules are imported anew."""
    monkeypatch.syspath_prepend(str(folder))
    entry_points = entry_points_in(folder)
    for point in entry_points:
        monkeypatch.delitem(sys.modules, point.module, raising=False)
    return discover(entry_points)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('no licence')", "importing 'ill' raised RuntimeError: no licence"),
        ("import not_installed_anywhere", "No module named 'not_installed_anywhere'"),
        ("x = 1", "declares no contract version"),
        ("api = 1", "declares no contract version"),
        ("api = (0, 9)", f"needs contract version 0.9, but this titan-core provides {PROVIDED}"),
        ("api = (2, 0)", f"needs contract version 2.0, but this titan-core provides {PROVIDED}"),
        ("api = (1, 7)", f"needs contract version 1.7, but this titan-core provides {PROVIDED}"),
        (HEAD + "@hookimpl\ndef titan_modles(): return []", "titan_modles"),
        (HEAD + "@hookimpl\ndef titan_step_end(report, speed): pass", "speed"),
        (HEAD + "def titan_models(): return []", "titan_models is not marked with @hookimpl"),
        (HEAD + "@hookimpl\ndef titan_models(): return 1 / 0", "titan_models raised ZeroDivisionError"),
        (HEAD + "@hookimpl\ndef titan_models(): return ['llama']", "'llama', which is not a Model"),
        (HEAD + "@hookimpl\ndef titan_models(): return 3", "hook titan_models returned 3; return a list of Models"),
        (HEAD + "@hookimpl\ndef titan_models():\n    yield 1 / 0", "titan_models raised ZeroDivisionError"),
        ("import sys; sys.exit(3)", "raised SystemExit"),
    ],
)
def test_a_broken_plugin_is_listed_with_its_reason_and_others_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
) -> None:
    write_distribution(tmp_path, "ill", source, version="0.3")
    write_distribution(tmp_path, "well", GOOD.format(name="papers"))
    result = found(tmp_path, monkeypatch)
    assert [(broken.name, broken.distribution, broken.version) for broken in result.broken] == [("ill", "ill", "0.3")]
    assert reason in result.broken[0].reason
    assert Components(result).names(Dataset) == ["papers"]


@pytest.mark.parametrize(("provided", "loads"), [((1, 1), True), ((2, 0), False)])
def test_a_plugin_loads_under_later_minor_versions_of_the_contract(
    provided: tuple[int, int], loads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "API_VERSION", provided)
    write_distribution(tmp_path, "well", GOOD.format(name="papers"))
    result = found(tmp_path, monkeypatch)
    assert Components(result).names(Dataset) == (["papers"] if loads else [])
    reasons = [broken.reason for broken in result.broken]
    assert reasons == ([] if loads else ["it needs contract version 1.0, but this titan-core provides 2.0"])


def test_a_job_that_needs_a_broken_plugin_fails_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, "sick", "raise RuntimeError('no licence')")
    registry = Components(found(tmp_path, monkeypatch))
    with pytest.raises(UserError, match=r"plugin 'sick' .* is broken: .*no licence"):
        registry.get(Model, "sick-model")


def test_two_components_of_one_name_concern_only_who_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, "first-papers", GOOD.format(name="papers"), version="1.2")
    write_distribution(tmp_path, "second-papers", GOOD.format(name="papers"), version="3.4")
    registry = Components(found(tmp_path, monkeypatch))
    with pytest.raises(UserError, match=r"dataset 'papers': claimed by both first-papers 1\.2 and second-papers 3\.4"):
        registry.get(Dataset, "papers")
    registry.without(["second_papers"]).get(Dataset, "papers")


def test_two_plugins_of_one_name_both_work_but_cannot_be_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, "one-data", GOOD.format(name="a"), plugin="mine")
    write_distribution(tmp_path, "two-data", GOOD.format(name="b"), plugin="mine")
    registry = Components(found(tmp_path, monkeypatch))
    assert registry.get(Dataset, "a") and registry.get(Dataset, "b")
    with pytest.raises(UserError, match=r"plugin 'mine': claimed by both one-data 1\.0 and two-data 1\.0"):
        registry.without(["mine"])


SECTION = """
from typing import ClassVar
from titan_core.api import Section
class S(Section):
    section: ClassVar[str] = {section!r}
    {key}: int = 1
"""


def with_section(name: str, section: str, key: str) -> str:
    return SECTION.format(section=section, key=key) + GOOD.format(name=name).replace("build=", "config=S, build=")


def test_a_plugin_that_claims_a_key_of_the_core_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, "thief", with_section("mine", "training", "steps"))
    (broken,) = found(tmp_path, monkeypatch).broken
    assert broken.reason == "its S claims training.steps, which is a config key of titan-core"


def test_two_owners_of_one_key_concern_only_who_sets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, "left", with_section("l", "papers", "shared"))
    write_distribution(tmp_path, "right", with_section("r", "papers", "shared"))
    mine = found(tmp_path, monkeypatch).plugins
    registry = Components(Discovery((*INSTALLED.plugins, *mine), ()))
    assemble(*load_config("tiny", [], registry))
    with pytest.raises(UserError, match=r"config key papers\.shared: claimed by both left 1\.0 and right 1\.0"):
        load_config("tiny", [Override("papers.shared", "2")], registry)


COMPONENTS = {
    "recipe": ("titan_recipes", "Recipe(name='{name}', summary='', package='{module}', path='x.toml')"),
    "command": ("titan_commands", "Command(name='{name}', summary='', run=Ref('{module}:hello'))"),
    "transform": (
        "titan_parallelisms",
        "Transform(name='{name}', summary='', phase=Phase.DATA, apply=Ref('{module}:apply'), "
        "active=lambda context: {active})",
    ),
    "observer": (
        "titan_debuggers",
        "Observer(name='{name}', summary='', build=Ref('a:b'), active=lambda context: {active})",
    ),
}
IMPORTS = """
from titan_core.api import Command, Observer, Phase, Recipe, Ref, Transform, hookimpl
api = (1, 0)
def hello(context):
    print("hello")
    return 0
"""


def twice(
    kind: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    active: bool = False,
    name: str = "shared",
    other: str = "shared",
) -> Components:
    """Return the registry of all plugins and of two that register a component of ``kind``, with one name or two."""
    hook, component = COMPONENTS[kind]
    for module, called in (("left", name), ("right", other)):
        shown = component.format(name=called, module=module, active=active)
        write_distribution(folder, module, f"{IMPORTS}@hookimpl\ndef {hook}(): return [{shown}]\n")
    both = found(folder, monkeypatch)
    assert not both.broken
    registry = Components(Discovery((*INSTALLED.plugins, *both.plugins), ()))
    monkeypatch.setattr(command_line.Components, "from_installed", lambda: registry)
    return registry


CLAIM = "'shared': claimed by both left 1.0 and right 1.0"


@pytest.mark.parametrize("kind", ["transform", "observer"])
def test_a_claimed_name_concerns_the_jobs_in_which_the_component_is_active(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config("tiny", [], twice(kind, tmp_path / "off", monkeypatch))
    assemble(*config)
    with pytest.raises(UserError, match=f"{kind} {CLAIM}"):
        assemble(*load_config("tiny", [], twice(kind, tmp_path / "on", monkeypatch, active=True)))


@pytest.mark.parametrize("kind", COMPONENTS)
def test_lists_show_conflicts(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    twice(kind, tmp_path, monkeypatch)
    listed = {"plugins": True, "recipes": kind == "recipe", "--help": kind == "command"}
    for command, shows in listed.items():
        assert main([command]) == 0
        assert (f"conflict: {kind} {CLAIM}" in capsys.readouterr().out) == shows
    assert main(["config", "check", "tiny"]) == 0  # which uses none of them


def test_a_recipe_and_a_command_that_two_plugins_claim_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    twice("recipe", tmp_path / "recipes", monkeypatch)
    assert main(["config", "check", "shared"]) == 2 and f"recipe {CLAIM}" in capsys.readouterr().err
    twice("command", tmp_path / "commands", monkeypatch)
    assert main(["shared"]) == 2 and f"command {CLAIM}" in capsys.readouterr().err
    twice("command", tmp_path / "others", monkeypatch, other="another")
    assert main(["shared"]) == 0 and capsys.readouterr().out == "hello\n"


ISLANDS = (
    IMPORTS
    + """
from typing import ClassVar
from titan_core.api import MeshDim, MeshUse, Section
class S(Section):
    section: ClassVar[str] = "{section}"
    degree: int = 1
@hookimpl
def titan_parallelisms():
    return [Transform(name="{section}", summary="", phase=Phase.DATA, apply=Ref("a:b"), active=lambda context: True,
        config=S, mesh=MeshUse(dims=(MeshDim("{dim}", "{key}", "batch"),)))]
"""
)


@pytest.mark.parametrize("dims", [("island", "island"), ("tp", "island")])
def test_two_mesh_dimensions_of_one_name_concern_only_who_uses_them(
    dims: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for section, dim in zip(("east", "west"), dims, strict=True):
        write_distribution(tmp_path, section, ISLANDS.format(section=section, dim=dim, key=f"{section}.degree"))
    registry = Components(Discovery((*INSTALLED.plugins, *found(tmp_path, monkeypatch).plugins), ()))
    assemble(*load_config("tiny", [], registry))
    with pytest.raises(UserError, match=f"mesh dimension '{dims[0]}': two plugins define it"):
        assemble(*load_config("tiny", [Override("east.degree", "2")], registry))


def test_a_mesh_dimension_whose_degree_is_no_key_breaks_its_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, "east", ISLANDS.format(section="east", dim="island", key="east.size"))
    (broken,) = found(tmp_path, monkeypatch).broken
    assert broken.reason == "mesh dimension 'island' has the degree 'east.size', which is no config key"


def test_a_mesh_dimension_with_a_misspelt_key_breaks_its_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = ISLANDS.format(section="east", dim="island", key="east.degree")
    text = text.replace('"batch")', '"weights", whole_positions_key="east.whole")')
    write_distribution(tmp_path, "east", text)
    (broken,) = found(tmp_path, monkeypatch).broken
    assert broken.reason == "mesh dimension 'island' has whole_positions_key 'east.whole', which is no config key"


HANGS = """
import threading
(timer,) = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
timer.join(60)
"""


def test_a_plugin_that_takes_long_to_load_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_distribution(tmp_path, "slow", HANGS + GOOD.format(name="papers"), version="0.3")
    write_distribution(tmp_path, "swift", GOOD.format(name="news"))
    monkeypatch.setattr(discovery, "SLOW_SECONDS", 0.25)  # the import ends when the line is printed
    assert Components(found(tmp_path, monkeypatch)).names(Dataset) == ["papers", "news"]
    line = "titan: plugin 'slow' (slow 0.3) is still loading after 0.25 s; TITAN_DISABLE_PLUGINS=slow leaves it out"
    assert caplog.messages == [line]
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_no_way_to_leave_out_the_core_is_suggested(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(discovery, "SLOW_SECONDS", 0.01)
    core = EntryPoint("core", "not_loaded_yet", "titan.plugins")
    with discovery._named_if_slow("plugin 'core'", core):
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join()
    assert caplog.messages == ["titan: plugin 'core' is still loading after 0.01 s"]


def test_training_names_the_plugins_that_failed_to_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_distribution(tmp_path / "sick", "sick", "raise RuntimeError('no licence')", version="0.3")
    broken = found(tmp_path / "sick", monkeypatch).broken
    registry = Components(Discovery(INSTALLED.plugins, broken))
    monkeypatch.setattr(command_line.Components, "from_installed", lambda: registry)
    monkeypatch.chdir(tmp_path)
    warning = "titan: warning: failed to load and not in use: plugin 'sick' (sick 0.3); see `titan plugins`"
    quick = ["train", "tiny", "--training.steps", "1"]
    assert main(quick) == 0
    assert capsys.readouterr().err.splitlines().count(warning) == 1
    assert main([*quick, "--plugins.disable", "['sick']", "--job.dump_folder", "other"]) == 0
    assert warning not in capsys.readouterr().err


def test_plugins_are_switched_off_by_variable_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, "one-data", GOOD.format(name="a"))
    write_distribution(tmp_path, "two-data", GOOD.format(name="b"))
    monkeypatch.setenv("TITAN_DISABLE_PLUGINS", "one_data, ")
    registry = Components(found(tmp_path, monkeypatch))
    assert registry.names(Dataset) == ["b"]
    assert registry.without(["two_data"]).names(Dataset) == []
    with pytest.raises(UserError, match="no plugin is named 'two_dota'; did you mean 'two_data'"):
        registry.without(["two_dota"])


def test_a_misspelt_name_in_the_variable_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plugin that it means would stay on."""
    monkeypatch.setenv("TITAN_DISABLE_PLUGINS", "harnes,core, nothing-like-it")
    assert main(["plugins"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "titan: error: environment: TITAN_DISABLE_PLUGINS: no plugin is named 'harnes'; did you mean 'harness'?"
    assert "no plugin is named 'nothing-like-it'; available: " in second


def test_titans_packages_are_found_and_sound() -> None:
    registry = Components.from_installed()
    ours = {plugin.distribution for plugin in registry.found.plugins}
    assert "titan-core" in ours
    assert registry.found.broken == ()
    assert registry.conflicts == []
