"""What the quick run leaves to the full one: listed tests, each of which exists, and rows beside those that it has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import quick
from harness.quick import PARTS, mark_other_rows, mark_parts, mark_slow


class Item:
    def __init__(self, nodeid: str, *marks: pytest.Mark) -> None:
        self.nodeid, self.marks = nodeid, list(marks)

    def add_marker(self, mark: str | pytest.MarkDecorator) -> None:
        self.marks.append(getattr(pytest.mark, mark).mark if isinstance(mark, str) else mark.mark)

    def iter_markers(self, name: str) -> Any:
        return (mark for mark in self.marks if mark.name == name)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next(self.iter_markers(name), None)


def full(items: list[Any]) -> list[str]:
    return [item.nodeid for item in items if item.get_closest_marker("full")]


def test_listed_tests_are_marked_and_each_line_must_be_a_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "LIST", listed := tmp_path / "slow.txt")
    listed.write_text("a.py::one\nb.py::one\n")
    (tmp_path / "b.py").touch()
    config: Any = SimpleNamespace(args=["tests"], rootpath=tmp_path)
    items: list[Any] = [Item("a.py::one"), Item("a.py::two")]
    mark_slow(config, items)  # b.py is not collected
    assert full(items) == ["a.py::one"]
    with pytest.raises(pytest.UsageError, match=r"slow\.txt lists 'a.py::one', which is no test: remove the line"):
        mark_slow(config, items[1:])
    config.args = ["a.py::two"]
    mark_slow(config, items[1:])
    config.args = ["tests"]
    (tmp_path / "b.py").unlink()
    with pytest.raises(pytest.UsageError, match=r"lists 'b\.py::one'"):
        mark_slow(config, items)


@pytest.mark.parametrize(("number", "rows"), [(1, "a"), (2, "ae"), (3, "ace"), (5, "abcde"), (9, "abcde")])
def test_the_quick_rows_of_a_table_are_spread_over_it(number: int, rows: str) -> None:
    items: list[Any] = [Item(f"a.py::one[{row}]", pytest.mark.quick_rows(number).mark) for row in "abcde"]
    others: list[Any] = [Item("a.py::two[a]"), Item("a.py::two[b]")]
    mark_other_rows([*items, *others])
    assert full([*items, *others]) == [f"a.py::one[{row}]" for row in "abcde" if row not in rows]


def test_every_full_test_is_in_one_part() -> None:
    items: list[Any] = [Item(f"tests/a.py::test_{number}", pytest.mark.full.mark) for number in range(1200)]
    quick: Any = Item("tests/a.py::test_quick")
    mark_parts([*items, quick])
    parts = [mark.kwargs["number"] for item in items for mark in item.iter_markers("part")]
    assert len(parts) == len(items)
    assert all(60 < parts.count(number) < 140 for number in range(PARTS))
    assert quick.get_closest_marker("part") is None
