"""A plugin that registers what it must not is broken, with the reason, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from harness.odd_plugin import TRANSFORM, registry_with
from titan_core.api import Model
from titan_core.api.config.resolved import Override
from titan_core.config.load import load_config
from titan_core.job.assemble import assemble
from titan_core.plugins.component_checks import GROUPS, RULES, components_from
from titan_core.plugins.discovery import REGISTRATION_HOOKS
from titan_core.toolkit.errors import PluginFailure

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


@pytest.mark.quick_rows(5)
@pytest.mark.parametrize("returned", BAD)
def test_what_a_registration_hook_must_not_return(returned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = registry_with(tmp_path, f"@hookimpl\ndef titan_models(): return {returned}\n", monkeypatch)
    (broken,) = [plugin for plugin in registry.found.broken if plugin.name == "odd"]
    assert "hook titan_models " in broken.reason and BAD[returned] in broken.reason
    assemble(*load_config("tiny", [], registry))  # which does not need it


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ("", ""),
        ("build=Ref('odd:raises'), active=yes", ""),
        ("build=Ref('odd:raises')", "has only one of build and active"),
        ("active=yes", "has only one of build and active; set both, or neither if it only reads models (find_model)"),
    ],
)
def test_a_format_that_is_only_read_builds_no_store(
    fields: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    component = f"Checkpoint(name='odd', summary='', find_model=Ref('odd:raises'), {fields})"
    registry = registry_with(tmp_path, f"@hookimpl\ndef titan_checkpoints(): return [{component}]\n", monkeypatch)
    broken = [plugin.reason for plugin in registry.found.broken if plugin.name == "odd"]
    assert bool(broken) == bool(reason) and all(reason in one for one in broken)
    if not broken and not fields:
        assert assemble(*load_config("tiny", [], registry)).checkpoint is None


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
        (TRANSFORM.format(active="yes", more=", mesh=MeshUse(sums='fsdp')"), "mesh.sums is 'fsdp', not a tuple of str"),
        (TRANSFORM.format(active="yes", more=", serves=(1,)"), "whose serves contains 1, not a str"),
        (TRANSFORM.format(active="yes", more=", mesh=MeshUse(dims=('x',))"), "whose mesh.dims contains 'x', not a MeshDim"),
        *(
            (
                TRANSFORM.format(active="yes", more=f", mesh=MeshUse(tolerance={value})"),
                f"mesh.tolerance is {shown}, not a number of at least 0 and less than 1",
            )
            for value, shown in (("'1 %'", "'1 %'"), ("True", "True"), ("1.0", "1.0"), ("float('nan')", "nan"))
        ),
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
