"""Python's garbage collector while a checkpoint is saved or restored."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from titan_ckpt.format.manifest import paused_gc
from titan_ckpt.format.reader import Reader
from titan_ckpt.format.writer import Writer
from titan_ckpt.resume import restoring
from titan_testing.jobs import run_recipe

SETTINGS: dict[str, object] = {"checkpoint.enable": "true", "checkpoint.async_mode": "disabled", "training.steps": 1}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with suppress(OSError), paused_gc():
        assert not gc.isenabled()
        raise OSError("the disk is full")
    assert gc.isenabled() is enabled


@pytest.mark.full
def test_no_collection_while_plans_and_manifests_are_handled(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.enable()
    seen: list[tuple[str, bool]] = []

    def watch(module: Any, name: str) -> None:
        original = getattr(module, name)

        def watched(*arguments: Any, **keywords: Any) -> Any:
            seen.append((name, gc.isenabled()))
            return original(*arguments, **keywords)

        monkeypatch.setattr(module, name, watched)

    watch(Writer, "save")
    watch(restoring, "entry")
    watch(Reader, "load")
    run_recipe("tiny", SETTINGS)
    run_recipe("tiny", {**SETTINGS, "training.steps": 2})
    assert gc.isenabled()
    assert set(seen) == {("save", False), ("entry", False), ("load", False)}
