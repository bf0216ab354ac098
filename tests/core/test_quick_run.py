"""The list of slow tests: what is written, and that each line is a test."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import slow_tests
from harness.slow_tests import SlowTests, mark_slow


class Item:
    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid
        self.marks: list[str] = []

    def add_marker(self, name: str) -> None:
        self.marks.append(name)


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "slow.txt"
    monkeypatch.setattr(slow_tests, "LIST", file)
    return file


def test_slow_tests_are_listed_but_the_fastest_of_a_file(listed: Path) -> None:
    listed.write_text("a.py::not_run\nb.py::two\n")
    plugin = SlowTests(1.0)
    seconds = {
        "a.py::one": (0.7, 0.7, 0.0),
        "a.py::two": (0.2, 0.2, 9.0),
        "b.py::one": (0.0, 3.0, 0.0),
        "b.py::two": (0.0, 2.0, 0.0),
    }
    for name, phases in seconds.items():
        for when, duration in zip(("setup", "call", "teardown"), phases, strict=True):
            report: Any = SimpleNamespace(nodeid=name, when=when, duration=duration)
            plugin.pytest_runtest_logreport(report)
    plugin.pytest_sessionfinish()
    assert listed.read_text().split() == ["a.py::not_run", "a.py::one", "b.py::one"]


def test_listed_tests_are_marked_and_each_line_must_be_a_test(listed: Path, tmp_path: Path) -> None:
    listed.write_text("a.py::one\nb.py::one\n")
    (tmp_path / "b.py").touch()
    config: Any = SimpleNamespace(args=["tests"], rootpath=tmp_path)
    items: list[Any] = [Item("a.py::one"), Item("a.py::two")]
    mark_slow(config, items)  # b.py is not collected
    assert [item.marks for item in items] == [["full", "slow"], []]
    with pytest.raises(pytest.UsageError, match=r"slow\.txt lists 'a.py::one', which is no test: remove the line"):
        mark_slow(config, items[1:])
    config.args = ["a.py::two"]
    mark_slow(config, items[1:])
    config.args = ["tests"]
    (tmp_path / "b.py").unlink()
    with pytest.raises(pytest.UsageError, match=r"lists 'b\.py::one'"):
        mark_slow(config, items)
