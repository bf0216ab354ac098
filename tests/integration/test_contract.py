"""The recorded contract of ``titan_core.api``, and what a change of it requires."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

import pytest
from sphinx.pycode import ModuleAnalyzer

import titan_core.api
from ci import contract
from ci.reference import LIBRARIES
from titan_core.api import _lazy

RECORD = """version 2.3

observe
    @dataclass(frozen=True)
    class Finding
        kind: str
        step: int = 0
    class DocumentSource(Protocol)
        def shard(self, index: int) -> DocumentShard
    class Run
        step: int
    def matches(name: str) -> bool
    Steps = Annotated[int, Field(le=10)]
    Rule = Column | Row

hooks
    @hookspec
    def titan_flush(step: int) -> None
"""


def test_the_record_of_the_contract_is_current() -> None:
    stale = "the contract has changed: raise API_VERSION if plugins can notice, then run `uv run python -m ci.contract`"
    assert contract.FILE.read_text(encoding="utf-8") == contract.render(), stale


def test_every_class_of_the_reference_describes_its_members() -> None:
    modules = [
        import_module(f"{one}.{file.name}") for one in LIBRARIES for file in iter_modules(import_module(one).__path__)
    ]
    found = [getattr(titan_core.api, name) for name in contract.importable_names()]
    found += [value for module in modules for name, value in vars(module).items() if not name.startswith("_")]
    classes = {one for one in found if isinstance(one, type) and one.__module__.startswith(("titan_core.api", *LIBRARIES))}
    assert sorted(name for one in classes for name in _undescribed(one)) == []


def _undescribed(cls: type) -> Iterator[str]:
    """Yield the public members without a docstring in a class or, if it overrides them, in its bases."""
    described = {"kind", "model_config"}  # the reference leaves them out
    for base in cls.__mro__:
        if base.__module__.startswith("titan_"):
            named = ModuleAnalyzer.for_module(base.__module__).find_attr_docs()
            described |= {name for owner, name in named if owner == base.__qualname__}
    for name in {*vars(cls), *vars(cls).get("__annotations__", {})}:
        public = not name.startswith("_") or name in ("__call__", "__contains__", "__getitem__", "__iter__")
        value = vars(cls).get(name)
        documented = inspect.getdoc(value) if inspect.isroutine(value) or isinstance(value, property) else name in described
        if public and not documented:
            yield f"{cls.__qualname__}.{name}"


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("    def matches(name: str) -> bool\n", "", "matches: removed"),
        ("        kind: str\n", "", "Finding.kind: removed"),
        ("kind: str", "kind: int", "Finding.kind: kind: str -> kind: int"),
        ("        kind: str\n", "        kind: str\n        text: str\n", "Finding.text: new"),
        ("class Run", "    def size(self) -> int\n    class Run", "DocumentSource.size: new"),
        ("index: int)", "index: int, count: int)", "DocumentSource.shard: def shard"),
        ("matches(name: str)", "matches(name: str, patterns: list[str])", "matches: def matches"),
        ("le=10", "le=9", "Steps: Steps = "),
        ("titan_flush(step: int)", "titan_flush()", "titan_flush: @hookspec def titan_flush"),
    ],
)
def test_a_change_that_breaks_plugins_needs_a_new_major_number(old: str, new: str, what: str) -> None:
    changed = RECORD.replace(old, new)
    assert [one for one in contract.changes(RECORD, changed).breaking if one.startswith(what)]
    assert contract.missing_bump(RECORD, changed.replace("2.3", "2.4")).startswith("these changes break plugins")
    assert contract.missing_bump(RECORD, changed.replace("2.3", "3.0")) == ""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    def matches", "    def nearest(word: str) -> str\n    def matches"),
        ("        kind: str\n", '        kind: str\n        text: str = ""\n'),
        ("        step: int\n", "        step: int\n        steps: int\n"),  # of Run, which plugins only receive
        ("matches(name: str)", "matches(name: str, patterns: tuple[str, ...]=())"),
        ("titan_flush(step: int)", "titan_flush(step: int, last: bool)"),
        ("hooks\n", "hooks\n    @hookspec\n    def titan_pause(step: int) -> None\n"),
        ("Rule = Column | Row", "Rule = Column | Row | Shard"),  # one more kind of value that a plugin may give
    ],
)
def test_an_addition_needs_a_new_minor_number(old: str, new: str) -> None:
    changed = RECORD.replace(old, new)
    found = contract.changes(RECORD, changed)
    assert found.added and not found.breaking
    assert contract.missing_bump(RECORD, changed).startswith("these are additions")
    assert contract.missing_bump(RECORD, changed.replace("2.3", "2.4")) == ""


def test_a_deprecated_name_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lazy, "DEPRECATED", {"Recipe": "use recipes_in"})
    monkeypatch.delitem(vars(titan_core.api), "Recipe", raising=False)
    with pytest.warns(DeprecationWarning, match=r"titan_core.api.Recipe goes with the next minor version: use recipes_in"):
        assert titan_core.api.Recipe is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert titan_core.api.Ref is not None


def test_classes_that_titan_makes_are_names_of_the_contract() -> None:
    assert contract.importable_names() >= contract.MADE_BY_TITAN
