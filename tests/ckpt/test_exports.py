"""Exports at every save: one at a time, the last ones kept, and failures that do not end the run. What an export contains is
tested in ``tests/integration/test_exported_runs.py``."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from titan_ckpt.config import CheckpointSection
from titan_ckpt.format.folder import Folder
from titan_ckpt.format.new_folder import new_folder
from titan_ckpt.save import export_process, exports
from titan_ckpt.save.export_process import ExportProcess
from titan_ckpt.save.exports import Exports
from titan_ckpt.save.retention import Retention, set_aside
from titan_core.api import UserError
from titan_core.toolkit.processes import is_alive, python
from titan_testing import PATIENCE
from titan_testing.jobs import TINY, make_job, run_recipe


class Process:
    """Stands in for the process: it ends when the test says so, and has then written the folder."""

    started: list[Process] = []  # noqa: RUF012 - of all tests; cleared by the fixture

    def __init__(self, step: int, checkpoint: Folder, target: Path, dtype: str, push: str | None) -> None:
        assert not target.exists(), "an export of the step is still there"
        assert all(not other.is_running for other in self.started), "two at once"
        self.step, self.checkpoint, self.target, self.dtype = step, checkpoint, target, dtype
        self.is_running, self.problem, self.killed = True, "", False
        self.target.with_name(target.name + ".partial").mkdir()
        self.started.append(self)

    def finish(self, problem: str = "") -> None:
        partial = self.target.with_name(self.target.name + ".partial")
        partial.rmdir() if problem else partial.rename(self.target)
        self.is_running, self.problem = False, problem

    def wait(self, seconds: float | None) -> bool:
        if seconds is None and self.is_running:
            self.finish()
        return not self.is_running

    def end(self) -> tuple[str, list[str]]:
        self.killed, self.is_running = self.is_running, False
        return self.problem, ["no tokenizer"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    Process.started.clear()
    monkeypatch.setattr(exports, "ExportProcess", Process)
    return Process.started


def make(folder: Path, keep: int = 2) -> Exports:
    section = CheckpointSection(enable=True, export="hf", export_keep_latest_k=keep, export_dtype="bfloat16")
    job = SimpleNamespace(dump_folder=str(folder))
    context: Any = SimpleNamespace(section=section, job=job, lock_folder=lambda path, where: None)
    return Exports(context)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "hf").iterdir())


def test_one_at_a_time_and_the_newest_next(tmp_path: Path, started: list[Process]) -> None:
    queue = make(tmp_path)
    for step in (2, 4, 6):
        (tmp_path / f"checkpoint/step-{step}/data").mkdir(parents=True)
        queue.add(step, Folder(f"{tmp_path}/checkpoint/step-{step}"))
    assert [one.step for one in started] == [2] and queue.in_use == {2, 6}
    assert not queue.advance()
    started[0].finish()
    assert queue.advance() and [one.step for one in started] == [2, 6] and queue.in_use == {6}
    assert started[1].dtype == "bfloat16" and str(started[1].checkpoint) == f"{tmp_path}/checkpoint/step-6"
    queue.wait(None)
    assert names(tmp_path) == ["step-2", "step-6"] and queue.in_use == set()


def test_the_last_are_kept_and_those_of_an_abandoned_part_are_left_alone(tmp_path: Path, started: list[Process]) -> None:
    (tmp_path / "hf/step-90").mkdir(parents=True)
    (tmp_path / "hf/notes").mkdir()
    queue = make(tmp_path)
    for step in (2, 4, 10):
        queue.add(step, Folder("."))
        queue.wait(None)
    assert names(tmp_path) == ["notes", "step-10", "step-4", "step-90"]
    queue = make(tmp_path, keep=0)
    queue.add(11, Folder("."))
    queue.wait(None)
    assert names(tmp_path) == ["notes", "step-10", "step-11", "step-4", "step-90"]


def test_a_failed_export_is_one_warning_and_the_next_is_made(
    tmp_path: Path, started: list[Process], caplog: pytest.LogCaptureFixture
) -> None:
    queue = make(tmp_path)
    with caplog.at_level(logging.WARNING):
        queue.add(2, Folder("."))
        started[0].finish("no space left")
        queue.advance()
        queue.add(4, Folder("."))
        queue.wait(None)
    assert [record.getMessage() for record in caplog.records] == [
        "export of step 2: no tokenizer",  # and not again at step 4
        "step 2 could not be exported; training continues: no space left",
    ]
    assert names(tmp_path) == ["step-4"]


def test_a_run_that_is_stopped_does_not_wait_for_long(
    tmp_path: Path, started: list[Process], caplog: pytest.LogCaptureFixture
) -> None:
    queue = make(tmp_path)
    queue.add(2, Folder("checkpoint/step-2"))
    queue.wait(0.0)
    assert started[0].killed and names(tmp_path) == [] and queue.in_use == set()
    assert "titan checkpoint convert checkpoint/step-2 " in caplog.text


def test_leftovers_are_removed_and_a_missing_export_is_made(tmp_path: Path, started: list[Process]) -> None:
    for name in ("step-2", "step-4.partial", "step-1.removed", "other.partial"):
        (tmp_path / "hf" / name).mkdir(parents=True)
        (tmp_path / "hf" / name / "config.json").touch()
    (tmp_path / "hf/.step-4.lock").touch()
    queue = make(tmp_path)
    assert names(tmp_path) == ["other.partial", "step-2"]
    queue.add_missing(2, Folder("."))
    assert started == []
    queue.add_missing(4, Folder("."))
    queue.wait(None)
    assert names(tmp_path) == ["other.partial", "step-2", "step-4"]


def test_a_checkpoint_that_is_being_exported_is_not_removed(in_tmp: Path) -> None:
    run_recipe("tiny", {**TINY, "checkpoint.enable": "true", "checkpoint.interval": 1, "job.dump_folder": "run"})
    checkpoints = Folder("run/checkpoint")
    retention = Retention(checkpoints, 1, 0)
    kept = checkpoints.list()[-1]
    newest = int(kept.removeprefix("step-"))
    assert len(checkpoints.list()) > 2
    retention.prune(newest, in_use={1})
    assert checkpoints.list() == ["step-1", kept]
    retention.prune(newest)
    assert checkpoints.list() == [kept]


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ({"export_folder": "s3://bucket/exports"}, "is an address"),
        ({"export_folder": "."}, "is the run's directory"),
        ({"export_folder": "checkpoint/"}, "is the folder of its checkpoints"),
    ],
)
def test_a_folder_that_is_not_for_exports_alone_is_refused(setting: dict[str, str], what: str, in_tmp: Path) -> None:
    overrides = {**TINY, "checkpoint.enable": "true", "checkpoint.export": "hf"}
    with pytest.raises(UserError, match=f"checkpoint.export_folder.*{what}.*name a folder for exports alone"):
        make_job("tiny", {**overrides, **{f"checkpoint.{key}": value for key, value in setting.items()}})


def test_a_model_that_cannot_be_exported_is_refused_before_the_first_step(in_tmp: Path) -> None:
    with pytest.raises(UserError) as caught:
        run_recipe("tiny", {**TINY, "checkpoint.enable": "true", "checkpoint.export": "hf", "job.dump_folder": "run"})
    assert re.fullmatch(
        r"checkpoint.export = 'hf': its checkpoints cannot be exported: plugin 'testing' \(titan-testing [\d.]+\): "
        "model 'tiny': cannot be exported to Hugging Face format; remove the key; or its author can declare a "
        "WeightFormat of 'safetensors' with from_args",
        str(caught.value),
    )
    assert not (in_tmp / "run/metrics.jsonl").exists()


def test_a_real_process_reports_why_it_failed(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TITAN_OUTCOMES", "outcomes")  # a rank of a launcher prints no errors
    process = ExportProcess(2, Folder("nowhere/step-2"), in_tmp / "hf/step-2", "float32", None)
    assert os.getpriority(os.PRIO_PROCESS, process._process.pid) == 19
    assert process.wait(PATIENCE)
    problem, warnings = process.end()
    assert problem.startswith("nowhere/step-2: there are no checkpoints here") and warnings == []
    assert not (in_tmp / "hf/step-2").exists()


CHILD = """
import sys, time
from pathlib import Path
from titan_ckpt.foreign import convert
from titan_core.cli.main import main
def wait(*arguments):
    Path("exporting").touch()
    time.sleep(1000)
convert.to_hf = wait
main(sys.argv[1:])
"""
PARENT = f"""
import time
from pathlib import Path
from titan_ckpt.format.folder import Folder
from titan_ckpt.save import export_process
from titan_core.toolkit.processes import python
export_process._LOWEST_PRIORITY = 0  # beside other tests, the lowest one gets next to no time
export_process.python = lambda module, name, *arguments: python("-c", {CHILD!r}, *arguments)
process = export_process.ExportProcess(1, Folder("checkpoint/step-1"), Path("hf/step-1"), "float32", None)
print(process._process.pid, flush=True)
time.sleep(1000)
"""


def test_it_ends_with_its_parent(in_tmp: Path) -> None:
    """An export that would take for ever. No file can make it: a pipe in the place of one is refused at once."""
    with subprocess.Popen(python("-c", PARENT), stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            waited(lambda: Path("exporting").exists() or not is_alive(child))
            assert is_alive(child)
            parent.kill()
            parent.wait()
            waited(lambda: not is_alive(child))
        finally:
            parent.kill()
            if is_alive(child):
                os.kill(child, signal.SIGKILL)


def waited(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait for ``condition``, and fail after some time without it."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_new_folder_is_durable_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, bool]] = []
    original = os.fsync

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        synced.append((path.name, (tmp_path / "new").exists()))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with new_folder(tmp_path / "new") as partial:
        (partial / "weights").write_bytes(b"1")
    assert synced == [("weights", False), ("new.partial", False), (tmp_path.name, True)]


@pytest.mark.full
def test_a_job_that_exports_nothing_imports_none_of_it(in_tmp: Path) -> None:
    code = (
        "import sys; from titan_testing.jobs import TINY, run_recipe; "
        "run_recipe('tiny', {**TINY, 'checkpoint.enable': 'true'}); "
        "print([name for name in sys.modules if 'titan_ckpt' in name and 'export' in name])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.splitlines()[-1] == "[]"


def test_what_a_rank_is_told_is_not_told_to_the_process() -> None:
    from titan_core.toolkit import launching

    told = {launching.OUTCOMES, launching.LISTENER, launching.JOB_KEY, "RANK", "WORLD_SIZE"}
    assert told <= set(export_process._OF_RANKS)


def rewound(folder: Path, step: int, **section: Any) -> list[str]:
    """Set aside what is of steps after ``step``; return where it is, within ``folder``."""
    values = {"enable": True, "export": "hf", **section}
    context: Any = SimpleNamespace(section=CheckpointSection(**values), job=SimpleNamespace(dump_folder=str(folder)))
    return [str(Path(path).relative_to(folder)) for path in set_aside(context, step)]


def test_exports_of_steps_that_the_run_goes_back_before_are_set_aside(tmp_path: Path, started: list[Process]) -> None:
    """With their checkpoints, under one number. They do not count among those that are kept."""
    of_steps = [f"hf/step-{step}" for step in (2, 4, 6, 8)]
    for name in ("checkpoint/step-4", "checkpoint/step-8", "hf/aside-1-step-8", *of_steps):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "hf/step-8/config.json").write_text("kept")
    expected = ["checkpoint/aside-2-step-8", "hf/aside-2-step-8", "hf/aside-2-step-6"]
    assert rewound(tmp_path, 4) == expected
    assert names(tmp_path) == ["aside-1-step-8", "aside-2-step-6", "aside-2-step-8", "step-2", "step-4"]
    assert (tmp_path / "hf/aside-2-step-8/config.json").read_text() == "kept"
    queue = make(tmp_path)
    queue.add(6, Folder("."))
    queue.wait(None)
    assert names(tmp_path) == ["aside-1-step-8", "aside-2-step-6", "aside-2-step-8", "step-4", "step-6"]


def test_folders_of_a_run_without_exports_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "hf/step-8").mkdir(parents=True)
    (tmp_path / "checkpoint/step-8").mkdir(parents=True)
    assert rewound(tmp_path, 4, export=None) == ["checkpoint/aside-1-step-8"]
    assert rewound(tmp_path, 4, export_folder="other") == []


def test_an_export_that_ends_after_its_checkpoint_was_set_aside_is_none(tmp_path: Path, started: list[Process]) -> None:
    """As where a job goes back from a spike while it exports."""
    queue = make(tmp_path)
    (tmp_path / "checkpoint/step-8/data").mkdir(parents=True)
    queue.add(8, Folder(f"{tmp_path}/checkpoint/step-8"))
    assert rewound(tmp_path, 4) == ["checkpoint/aside-1-step-8"]
    queue.wait(None)
    assert names(tmp_path) == []
