"""A job ends with one line that names the plugin whose code fails."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from harness.distributions import entry_points_in, write_distribution
from harness.odd_plugin import INSTALLED
from titan_core.cli import main as command_line
from titan_core.cli.main import main
from titan_core.plugins.discovery import Discovery, discover
from titan_core.plugins.registry import Components

PLUGIN = """
from titan_core.api import Dataset, Observer, LRSchedule, Ref, hookimpl
api = (1, 0)
class Shard:
    def __iter__(self): return self
    def __next__(self): raise KeyError("text")
    def state_dict(self): return {}
    def load_state_dict(self, state): pass
class Source:
    num_documents = 64
    def shard(self, index, count, epoch): return Shard()
def open_source(context): return Source()
class Watcher:
    answers = {}
    @hookimpl
    def titan_figures(self, record): return self.answers.get("titan_figures")
    @hookimpl
    def titan_save_state(self): return self.answers.get("titan_save_state")
    @hookimpl
    def titan_before_update(self): return self.answers.get("titan_before_update")
def observe(context): return Watcher()
def schedule(context):
    from torch.optim.lr_scheduler import LambdaLR
    return LambdaLR(context.optimizer, lambda step: float("nan"))
@hookimpl
def titan_datasets(): return [Dataset(name="odd", summary="", build=Ref("odd:open_source"))]
@hookimpl
def titan_debuggers(): return [Observer(name="odd", summary="", build=Ref("odd:observe"), active=lambda context: True)]
@hookimpl
def titan_lr_schedules(): return [LRSchedule(name="odd", summary="", build=Ref("odd:schedule"))]
"""
JOBS: dict[str, tuple[dict[str, Any], list[str], int]] = {
    "dataset 'odd': __next__ raised KeyError: 'text'": ({}, ["--training.dataset", "odd"], 1),
    "lr schedule 'odd': set the learning rates [nan": ({}, ["--lr_scheduler.name", "odd"], 2),
    "observer 'odd': titan_figures returned 3": ({"titan_figures": 3}, [], 2),
    "observer 'odd': titan_figures returned {'x': nan}": ({"titan_figures": {"x": float("nan")}}, [], 2),
    "observer 'odd': titan_save_state returned ['mine']": ({"titan_save_state": ["mine"]}, [], 2),
    "observer 'odd': titan_before_update returned 1": ({"titan_before_update": 1}, [], 2),
}


@pytest.mark.parametrize("message", JOBS)
def test_a_job_ends_with_one_line(
    message: str, in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, arguments, status = JOBS[message]
    write_distribution(in_tmp / "site", "odd", PLUGIN)
    monkeypatch.syspath_prepend(str(in_tmp / "site"))
    monkeypatch.delitem(sys.modules, "odd", raising=False)
    mine = discover(entry_points_in(in_tmp / "site"))
    registry = Components(Discovery((*INSTALLED.plugins, *mine.plugins), mine.broken))
    monkeypatch.setattr(command_line.Components, "from_installed", lambda: registry)
    import odd  # type: ignore[import-not-found]

    monkeypatch.setattr(odd.Watcher, "answers", answers)
    assert main(["train", "tiny", "--training.steps", "2", *arguments]) == status
    errors = [line for line in capsys.readouterr().err.splitlines() if "warning" not in line]
    (line,) = [line for line in errors if line.startswith("titan: error: ")]
    assert line.startswith("titan: error: plugin 'odd' (odd 1.0): ") and message in line
    assert "Traceback" not in "\n".join(errors)
