"""A JSON file that must hold an object is read, or refused in one line; and which values survive JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_core.api import UserError
from titan_core.toolkit.plain_json import read_object, survives_json
from titan_core.toolkit.runs.record_checks import checked_records, metrics_flaw


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
        (b"[" * 100_000, "cannot be used: its lists and objects are nested too deeply"),
        (b'{"a": ' + b"[" * 101 + b"]" * 101 + b"}", "cannot be used: its lists and objects are nested too deeply"),
        (b'{"a": [{"loss": 1' + b"0" * 400 + b"}]}", "cannot be used: a[0].loss is an integer of 1,329 bits"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "cannot be used: an integer has more than 4,300 digits"),
        (b'{"a": {"b": "x\\ud83dy"}}', "cannot be used: a.b has half of a surrogate pair, which is no character"),
        (b'{"x\\uDEADy": 1}', "cannot be used: a key has half of a surrogate pair"),
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


def test_what_others_write_is_read(tmp_path: Path) -> None:
    """A tokenizer's largest length, an infinity, a pair of surrogates, and the digits of a text."""
    file = tmp_path / "one.json"
    file.write_text(
        '{"length": 1000000000000000019884624838656, "limit": Infinity, "text": "\\ud83d\\ude00 1' + "0" * 400 + '"}'
    )
    assert read_object(file, "fetch it") == {"length": int(1e30), "limit": float("inf"), "text": "\U0001f600 1" + "0" * 400}


HOSTILE = {
    "10^4000": ('"loss": 1' + "0" * 4000, "loss is an integer of 13,288 bits"),
    "a lone surrogate": ('"loss": 1.0, "name": "\\udc80"', "name has half of a surrogate pair, which is no character"),
    "nested": ('"loss": ' + "[" * 200_000 + "]" * 200_000, "its lists and objects are nested too deeply"),
    "no JSON": ('"loss": ', "is not a JSON object"),
    "a large step": ('"loss": 1.0, "step": 1' + "0" * 30, "invalid record: its 'step' is not a whole number"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_record_of_a_run_is_named_by_its_line(name: str, tmp_path: Path) -> None:
    hostile, why = HOSTILE[name]
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, ' + hostile + "}\n")
    with pytest.raises(UserError) as caught:
        list(checked_records(file, metrics_flaw))
    (problem,) = caught.value.problems
    assert (problem.where, problem.why) == (f"{file}:2", why)


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
