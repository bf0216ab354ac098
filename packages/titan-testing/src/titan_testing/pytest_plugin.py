"""The fixtures of the kit, which pytest finds wherever titan-testing is installed. Imports no torch by itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from titan_core.plugins.discovery import CORE, DISABLE_VARIABLE, GROUP

if TYPE_CHECKING:
    from titan_testing.gloo_pool import GlooPool
    from titan_testing.jobs import RunRecord

RunJob = Callable[..., "RunRecord"]
"""``run_job(recipe, overrides, world_size=1)``: trains in a fresh folder on so many gloo ranks; returns one record."""

TEXTS = [
    "The first of ten documents is longer than most: it fills more than one short sequence by itself.",
    "x",
    "Short.",
    "äöü ÄÖÜ ß — not only ASCII",
    "Documents are read between a begin and an end, one after another, whatever their length may be.",
    "0123456789 0123456789",
    "def f(x):\n    return x + 1\n",
    "aaaa bbbb aaaa bbbb aaaa bbbb",
    "One, two, three, four, five, six, seven, eight, nine, ten.",
    "The end.",
]


@pytest.fixture(scope="session")
def gloo() -> Iterator[GlooPool]:
    """Processes for jobs on several ranks. They live as long as the session, because importing torch takes seconds."""
    from titan_testing.gloo_pool import GlooPool

    pool = GlooPool(stacks=True)
    yield pool
    pool.close()


@pytest.fixture
def run_job(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> RunJob:
    """Trains a recipe; see :data:`RunJob`. Of a run on several ranks, the record has all parameters of all of them."""
    from titan_testing.meshes import merged, run_in

    def run(recipe: str, overrides: Mapping[str, object] | None = None, world_size: int = 1) -> RunRecord:
        folder = tmp_path_factory.mktemp("run")
        settings = {"job.device": "cpu", **(overrides or {})}
        return merged(gloo.run(world_size, run_in, str(folder), settings, recipe=recipe))

    return run


@pytest.fixture
def only_plugins(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``only_plugins("tinylm", "parallel")`` switches off all installed plugins but the core and those named: what a user
    has who installs no others. Holds for the processes that the test starts too."""
    import importlib_metadata

    def switch_off(*kept: str) -> None:
        installed = importlib_metadata.entry_points(group=GROUP).names
        if unknown := set(kept) - installed:
            raise ValueError(f"no such plugins are installed: {', '.join(sorted(unknown))}")
        monkeypatch.setenv(DISABLE_VARIABLE, ",".join(sorted(installed - {CORE, *kept})))

    return switch_off


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """A file of JSON Lines with ten short documents: ``{"text": ...}``."""
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    return path


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test of a suite that has a parameter ``row`` its rows, which the suite's ``rows`` returns."""
    if "row" in metafunc.fixturenames and hasattr(metafunc.cls, "rows"):
        rows: Mapping[str, Any] = metafunc.cls().rows(metafunc.function.__name__)
        metafunc.parametrize("row", list(rows.values()), ids=list(rows))
