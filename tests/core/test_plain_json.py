"""A JSON file that must hold an object is read, or refused in one line; and which values survive JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_core.api import UserError
from titan_core.toolkit.plain_json import read_object, survives_json


def test_an_object_is_read(tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    file.write_text('{"a": [1, "ü"]}', encoding="utf-8")
    assert read_object(file, "fetch it") == {"a": [1, "ü"]}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is not JSON: "),
        (b'{"a": ', "is not JSON: "),
        (b"\xff\xfe{}", "is not JSON: "),
        (b"[" * 100_000, "is not JSON: "),
        (b"[1]", "contains an array, not an object"),
        (b"null", "contains null, not an object"),
        (b"true", "contains a boolean, not an object"),
        (b"3", "contains a number, not an object"),
        (b"0.5", "contains a number, not an object"),
        (b'"text"', "contains a string, not an object"),
    ],
)
def test_anything_else_is_one_clear_error(tmp_path: Path, content: bytes, why: str) -> None:
    file = tmp_path / "one.json"
    file.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_object(file, "fetch it")
    (problem,) = caught.value.problems
    assert (problem.where, problem.fix) == (str(file), "fetch it")
    assert problem.why.startswith(why)


def test_a_file_that_cannot_be_opened_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"one\.json: no such file; fetch it"):
        read_object(tmp_path / "one.json", "fetch it")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_object(tmp_path, "fetch it")


def test_values_that_json_changes_do_not_survive() -> None:
    circular: list[object] = []
    circular.append(circular)
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (None, True, 1, 2**70, 0.1, "ü", [1, [2]], {"a": {"b": None}}):
        assert survives_json(value)
    for value in ((1, 2), {1: 2}, {"a": (1,)}, {1, 2}, float("nan"), b"a", object(), circular, deep):
        assert not survives_json(value)
