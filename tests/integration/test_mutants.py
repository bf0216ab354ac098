"""The catalogue of mutants matches the sources, and the runner distinguishes killed from surviving mutants."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mutants.catalogue import MUTANTS
from benchmarks.mutants.mutant import ROOT, Mutant
from benchmarks.mutants.trial import DEFAULT, FULL, run_tests, try_out


@pytest.fixture(autouse=True)
def _tree_without_the_kit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trees of these tests have no titan-testing, which pytest would load from there."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:titan")


def in_fresh_process(function: Callable[..., Any], *arguments: object) -> Any:
    """Call ``function`` in a new process. Mutants are tried in forks, and a fork of this process would inherit the threads,
    locks and caches of other tests."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def test_every_mutant_applies_to_the_sources() -> None:
    assert [f"{one.name}: {flaw}" for one in MUTANTS if (flaw := one.flaw(ROOT))] == []
    assert len({one.name for one in MUTANTS}) == len(MUTANTS)


def test_every_mutant_is_python_and_names_tests_that_exist() -> None:
    for one in MUTANTS:
        compile(one.mutated(ROOT), one.path, "exec")
        for test in one.tests:
            file, _, name = test.partition("::")
            if (ROOT / file).is_dir():
                continue
            # Of a suite's class, the method may be inherited.
            owner = name.partition("[")[0].partition("::")[0]
            assert f"{'class' if owner.startswith('Test') else 'def'} {owner}" in (ROOT / file).read_text(
                encoding="utf-8"
            ), test


SOURCE = "def larger(a, b):\n    return a if a > b else b\n"
TEST = """
import runpy
larger = runpy.run_path("packages/titan-core/src/titan_core/loop/larger.py")["larger"]

def test_larger():
    assert larger(1, 2) == 2

def test_waits():
    while larger(3, 3) != 3:
        pass
"""


@pytest.mark.parametrize(
    ("old", "new", "killed_by"),
    [
        pytest.param("a > b", "a < b", "FAILED tests/test_larger.py::test_larger", id="noticed"),
        pytest.param("a > b", "a >= b", "", id="equivalent", marks=pytest.mark.full),
        pytest.param("else b", "else b - (a == b)", "timeout after 2 s", id="hangs", marks=pytest.mark.full),
        pytest.param("else b", "else ) b", "ERROR tests/test_larger.py", id="no Python", marks=pytest.mark.full),
    ],
)
def test_a_mutant_is_killed_where_a_test_fails(tmp_path: Path, old: str, new: str, killed_by: str) -> None:
    mutant = Mutant("m", "core/loop/larger.py", old, new, ("tests/test_larger.py",))
    file = tmp_path / mutant.path
    for path, text in ((file, SOURCE), (tmp_path / "tests/test_larger.py", TEST)):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    patience = 2.0 if killed_by.startswith("timeout") else 300.0
    verdict = in_fresh_process(try_out, tmp_path, mutant, mutant.tests, patience)
    assert verdict.killed_by == killed_by
    assert file.read_text() == SOURCE


@pytest.mark.full
def test_tests_of_the_full_run_are_tried_apart(tmp_path: Path) -> None:
    mutant = Mutant("m", "core/loop/larger.py", "a > b", "a < b", ("tests/test_larger.py",))
    marked = TEST.replace("\ndef test_larger", "\nimport pytest\n@pytest.mark.full\ndef test_larger")
    for path, text in ((tmp_path / mutant.path, SOURCE), (tmp_path / "tests/test_larger.py", marked)):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    for marks, killed_by in ((DEFAULT, ""), (FULL, "FAILED tests/test_larger.py::test_larger")):
        assert in_fresh_process(try_out, tmp_path, mutant, mutant.tests, 300.0, marks).killed_by == killed_by


@pytest.mark.full
def test_missing_tests_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    with pytest.raises(RuntimeError, match="nowhere"):
        in_fresh_process(run_tests, tmp_path, ["tests/nowhere.py"], 60.0)


def test_a_mutant_of_other_sources_is_refused(tmp_path: Path) -> None:
    mutant = Mutant("m", "core/loop/larger.py", "a", "b", ())
    assert mutant.flaw(tmp_path) == "packages/titan-core/src/titan_core/loop/larger.py does not exist"
    (tmp_path / mutant.path).parent.mkdir(parents=True)
    (tmp_path / mutant.path).write_text(SOURCE)
    assert "occurs" in mutant.flaw(tmp_path)
    with pytest.raises(ValueError, match="mutant m: "):
        mutant.mutated(tmp_path)
