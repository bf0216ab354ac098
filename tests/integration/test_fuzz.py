"""A short run of the fuzz command, and tests that it detects failures."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.fuzz import configs
from benchmarks.fuzz.__main__ import run_parts
from titan_core.api import UserError
from titan_core.plugins.registry import Components


@pytest.mark.parametrize(
    ("part", "count"),
    [
        ("configs", 400),
        pytest.param("checkpoints", 25, marks=pytest.mark.full),
        pytest.param("hf", 20, marks=pytest.mark.full),
    ],
)
def test_no_damaged_or_absurd_input_is_accepted_or_ends_in_a_traceback(part: str, count: int, tmp_path: Path) -> None:
    assert run_parts({part: count}, seed=20, folder=tmp_path) == []


def test_a_case_is_made_from_its_seed_and_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = [[], []]
    for made in seen:
        monkeypatch.setattr(configs, "check", lambda case, *_, made=made, **__: made.append(str(case)))
        configs.run(30, 3, tmp_path)
    assert seen[0] == seen[1] and len(set(seen[0])) > 20


def _raises(*_: object) -> None:
    raise KeyError("not for users")


def _hangs(*_: object) -> None:
    while True:
        time.sleep(0.01)


def _takes_memory(*_: object) -> None:
    bytearray(2**40)


@pytest.mark.parametrize(
    ("broken", "failure"),
    [(_raises, "KeyError: 'not for users'"), (_hangs, "took longer than 0.2 s"), (_takes_memory, "MemoryError")],
)
def test_a_failure_is_detected(broken: object, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Components.from_installed()
    monkeypatch.setattr(configs, "load_config", broken)
    monkeypatch.setattr(configs, "LONGEST_SECONDS", 0.2)
    assert failure in configs.run_limited([configs.Case(None, "llama3_debug")], registry, tmp_path)[0]


def test_an_accepted_absurd_value_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Components.from_installed()
    fine = configs.Case(b"[training]\nsteps = 77\n[model]\nname = 'llama3'\n", "fuzz.toml", [], 1)
    assert configs.check(fine, registry, tmp_path) == ""
    monkeypatch.setattr(configs, "LARGEST", 76)
    assert configs.check(fine, registry, tmp_path).startswith("accepted ")


def test_a_reported_mistake_is_not_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise UserError.one("here", "not so")

    monkeypatch.setattr(configs, "load_config", refuses)
    assert configs.run(2, 0, tmp_path) == []
