"""Discovery: a broken plugin is reported and affects no other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.distributions import entry_points_in, write_distribution
from titan_core.api.components import Dataset, Model
from titan_core.api.errors import UserError
from titan_core.plugins.discovery import Discovery, discover
from titan_core.plugins.registry import Registry

GOOD = """
from titan_core.api.components import Dataset
from titan_core.api.hookspecs import hookimpl
from titan_core.api.ref import Ref
api = (1, 0)
@hookimpl
def titan_datasets():
    return [Dataset(name={name!r}, summary="made up", build=Ref("nowhere:at_all"))]
"""

HEAD = "from titan_core.api.hookspecs import hookimpl\napi = (1, 0)\n"


def found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Discovery:
    monkeypatch.syspath_prepend(str(folder))
    return discover(entry_points_in(folder))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('no licence')", "importing 'ill' raised RuntimeError: no licence"),
        ("import not_installed_anywhere", "No module named 'not_installed_anywhere'"),
        ("x = 1", "declares no contract version"),
        ("api = 1", "declares no contract version"),
        ("api = (2, 0)", "needs contract version 2.0, but this titan-core provides 1.0"),
        ("api = (1, 7)", "needs contract version 1.7, but this titan-core provides 1.0"),
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
    monkeypatch.delitem(sys.modules, "ill", raising=False)
    result = found(tmp_path, monkeypatch)
    assert [(broken.name, broken.distribution, broken.version) for broken in result.broken] == [("ill", "ill", "0.3")]
    assert reason in result.broken[0].reason
    assert Registry(result).names(Dataset) == ["papers"]
    monkeypatch.delitem(sys.modules, "ill", raising=False)
    monkeypatch.delitem(sys.modules, "well", raising=False)


def test_a_job_that_needs_a_broken_plugin_fails_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, "sick", "raise RuntimeError('no licence')")
    registry = Registry(found(tmp_path, monkeypatch))
    with pytest.raises(UserError, match=r"plugin 'sick' .* is broken: .*no licence"):
        registry.get(Model, "sick-model")


def test_two_components_of_one_name_are_an_error_that_names_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, "first-papers", GOOD.format(name="papers"), version="1.2")
    write_distribution(tmp_path, "second-papers", GOOD.format(name="papers"), version="3.4")
    registry = Registry(found(tmp_path, monkeypatch))
    with pytest.raises(UserError, match=r"dataset 'papers': claimed by both first-papers 1\.2 and second-papers 3\.4"):
        registry.require_sound()
    registry.without(["second_papers"]).require_sound()


def test_two_plugins_of_one_name_are_an_error_that_names_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, "one-data", GOOD.format(name="a"), plugin="mine")
    write_distribution(tmp_path, "two-data", GOOD.format(name="b"), plugin="mine")
    with pytest.raises(UserError, match=r"plugin 'mine': claimed by both one-data 1\.0 and two-data 1\.0"):
        Registry(found(tmp_path, monkeypatch)).require_sound()


def test_two_owners_of_one_key_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thief = GOOD.format(name="mine").replace(
        "api =",
        "from typing import ClassVar\nfrom titan_core.api.section import Section\n"
        "class S(Section):\n    section: ClassVar[str] = 'training'\n"
        "    steps: int = 1\napi =",
    )
    write_distribution(tmp_path, "thief", thief.replace('summary="made up"', 'summary="", config=S'))
    with pytest.raises(UserError, match=r"config key training\.steps: claimed by both titan-core itself and thief 1\.0"):
        Registry(found(tmp_path, monkeypatch)).require_sound()


def test_plugins_are_switched_off_by_variable_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, "one-data", GOOD.format(name="a"))
    write_distribution(tmp_path, "two-data", GOOD.format(name="b"))
    monkeypatch.setenv("TITAN_DISABLE_PLUGINS", "one_data, unknown")
    registry = Registry(found(tmp_path, monkeypatch))
    assert registry.names(Dataset) == ["b"]
    assert registry.without(["two_data"]).names(Dataset) == []
    with pytest.raises(UserError, match="no plugin is named 'two_dota'; did you mean 'two_data'"):
        registry.without(["two_dota"])


def test_titans_packages_are_found_and_sound() -> None:
    registry = Registry.from_installed()
    ours = {plugin.distribution for plugin in registry.found.plugins}
    assert "titan-core" in ours
    assert registry.found.broken == ()
    registry.require_sound()
