"""Metric loggers: their files, and failures while they write."""

from __future__ import annotations

import errno
import itertools
import os
import random
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.distributions import write_distribution
from titan_core.api import UserError, hookimpl
from titan_core.runlog.reporter import MetricsFile
from titan_core.toolkit import json_lines
from titan_core.toolkit.json_lines import LineFile, read_lines
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import TINY, run_recipe

RUN: dict[str, object] = {**TINY, "job.dump_folder": "run"}


def metrics(folder: Path) -> list[dict[str, Any]]:
    return read_lines(folder / "metrics.jsonl")


BROKEN = """
from titan_core.api import Observer, Ref, hookimpl

api = (1, 0)

class Breaks:
    where = None
    def __init__(self, request):
        self.fail("build")
    def fail(self, where):
        if type(self).where == where:
            raise OSError(f"no space left, in {where}")
    @hookimpl
    def titan_metrics(self, record):
        self.fail("log")
    @hookimpl
    def titan_train_end(self, end):
        self.fail("close")
    @hookimpl
    def titan_step_end(self, report):
        self.fail("hook")
        counted.append(report.step)

counted = []

@hookimpl
def titan_metric_loggers():
    return [Observer(name="breaks", summary="", build=Ref("broken_logger:Breaks"), active=lambda context: True,
                     first_rank=True, may_fail=True)]
"""


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize("where", ["build", "log", "hook", "close"])
def test_a_logger_that_fails_is_switched_off_and_training_continues(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    write_distribution(in_tmp / "site", "broken-logger", BROKEN)
    monkeypatch.syspath_prepend(str(in_tmp / "site"))
    monkeypatch.delitem(sys.modules, "broken_logger", raising=False)
    import broken_logger  # type: ignore[import-not-found]

    monkeypatch.setattr(broken_logger.Breaks, "where", where)
    record = run_recipe("tiny", RUN)
    assert record.reason == "all steps are done"
    assert [line["step"] for line in metrics(in_tmp / "run")] == [1, 2, 4]
    messages = [line.message for line in caplog.records if "breaks" in line.message]
    assert len(messages) == 1  # reported once, then switched off
    assert messages[0].startswith("observer 'breaks' failed and is switched off: plugin 'broken_logger' (broken-logger 1.0)")
    assert f"raised OSError: no space left, in {where}" in messages[0]
    assert broken_logger.counted == {"build": [], "log": [1], "hook": [], "close": [1, 2, 3, 4]}[where]
    findings = [event for event in read_lines(in_tmp / "run/events.jsonl") if event["event"] == "finding"]
    assert [finding["kind"] for finding in findings] == ["observer"]


def ranks_metrics(folder: str) -> dict[str, Any]:
    os.chdir(folder)
    seen = []

    class Watch:
        @hookimpl
        def titan_step_end(self, report: Any) -> None:
            seen.append((report.loss.item(), report.rank_losses.tolist()))

    run_recipe("tiny", {**RUN, "training.local_batch_size": 1}, observers=[Watch()])
    return {"steps": seen}


def test_the_loss_of_each_data_rank(gloo: GlooPool, tmp_path: Path) -> None:
    both = gloo.run(2, ranks_metrics, str(tmp_path))
    assert both[0] == both[1]
    for loss, by_rank in both[0]["steps"]:
        assert len(by_rank) == 2 and by_rank[0] != by_rank[1]
        assert sum(by_rank) / 2 == pytest.approx(loss)  # both ranks have the same number of targets
    last = metrics(tmp_path / "run")[-1]
    assert last["loss_max"] == pytest.approx(max(both[0]["steps"][-1][1]))
    assert last["loss_max"] > last["loss"]
    parts = ("data", "forward_backward", "optimizer", "checkpoint")
    assert 0.5 * last["step_seconds"] < sum(last[f"{part}_seconds"] for part in parts) <= 1.05 * last["step_seconds"]
    assert last["memory_peak_gib"] >= last["memory_active_gib"] > 0.05
    assert last["tokens_per_second_per_device"] == pytest.approx(last["tokens_per_second"] / 2)
    (start, *spent, end) = read_lines(tmp_path / "run/events.jsonl")
    assert start["event"] == "start" and start["world_size"] == 2 and start["mesh"] == {"dp_shard": 2}
    assert len({process["pid"] for process in start["processes"]}) == 2
    assert end["event"] == "end" and end["completed"]
    for event in spent:  # the sum of both ranks
        assert sum(event["seconds"].values()) == pytest.approx(2 * (event["time"] - start["began"]), rel=0.01)


def test_a_torn_last_line_is_cut_off_before_more_is_written(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(b'{"event": "start"}\n{"event": "\xc3')
    assert read_lines(file) == [{"event": "start"}]
    lines = LineFile(file)
    lines.append({"event": "start", "step": 2})
    lines.close()
    assert read_lines(file) == [{"event": "start"}, {"event": "start", "step": 2}]
    file.write_text('{"event": "start"}\n{"eve\n{"event": "end"}\n')
    with pytest.raises(UserError, match=r"events\.jsonl:2: is not a JSON object"):
        read_lines(file)


def test_a_process_killed_at_any_moment_leaves_whole_lines(tmp_path: Path) -> None:
    """A process appends to a file, is killed, and is started again several times."""
    file = tmp_path / "metrics.jsonl"
    random.seed(0)
    for _ in range(20):
        before = len(read_lines(file))
        child = os.fork()
        if child == 0:
            log = MetricsFile(None)  # type: ignore[arg-type] # reads nothing in its context
            log.titan_train_start(SimpleNamespace(dump_folder=str(tmp_path)))  # type: ignore[arg-type]
            for step in itertools.count(before + 1):
                log.titan_metrics({"step": step, "loss": 1.0 / step, **{f"tokens_seen/{name}": step for name in range(400)}})
                time.sleep(0.0002)
        while (
            not file.exists() or file.read_bytes().count(b"\n") <= before
        ):  # at least one more line, even on a busy machine
            time.sleep(0.0002)
        time.sleep(random.uniform(0.0, 0.01))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    records = read_lines(file)
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    assert len(records) >= 20


class Disk:
    """Fails ``failures`` times from the ``first`` write on, each time with a part of the line written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, first: int, failures: int) -> None:
        self._number, self._failing = number, range(first, first + failures)
        self.writes = 0
        monkeypatch.setattr(json_lines, "_write", self.write)

    def write(self, descriptor: int, line: bytes) -> int:
        self.writes += 1
        if self.writes in self._failing:
            os.write(descriptor, line[: len(line) // 2])
            raise OSError(self._number, os.strerror(self._number))
        return os.write(descriptor, line)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT], ids=errno.errorcode.get)
def test_lines_that_a_full_disk_rejected_are_written_later_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    disk, file = Disk(monkeypatch, number, first=2, failures=3), LineFile(tmp_path / "lines.jsonl")
    assert [file.append({"step": step}) for step in range(1, 7)] == [True, False, False, False, True, True]
    file.close()
    assert read_lines(tmp_path / "lines.jsonl") == [{"step": step} for step in range(1, 7)]
    first, second = (record.getMessage() for record in caplog.records)
    assert first.endswith(f"cannot be written: {os.strerror(number)}; lines are kept and retried")
    assert second.endswith("can be written again; no line was lost")
    assert disk.writes == 9


@pytest.mark.parametrize("another", [True, False], ids=["replaced", "removed"])
def test_a_file_that_is_replaced_while_a_run_writes_is_noticed(
    another: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As an editor does when it saves, and a synchronisation when it copies back."""
    path, before = tmp_path / "lines.jsonl", tmp_path / "before.jsonl"
    file = LineFile(path)
    for number in range(3):
        assert file.append({"n": number})
    path.rename(before)
    if another:
        path.write_text('{"n": 0}\n')
    for number in range(3, 6):
        assert file.append({"n": number})
    file.close()
    assert [line["n"] for line in read_lines(before)] == [0, 1, 2]
    assert [line["n"] for line in read_lines(path)] == [0] * another + [3, 4, 5]
    (said,) = (record.getMessage() for record in caplog.records)
    assert said == f"{path} was replaced or removed; further lines are appended to the file that is there now"


def test_a_line_never_has_half_of_a_surrogate_pair(tmp_path: Path) -> None:
    """Where the locale is C, Python represents each byte of a name beyond ASCII by one."""
    name = "réz.toml".encode().decode("ascii", "surrogateescape")
    file = LineFile(tmp_path / "lines.jsonl")
    for text in (name, "\U0001f600", "a\ud83db"):
        file.append({"text": text})
    file.close()
    assert [line["text"] for line in read_lines(tmp_path / "lines.jsonl")] == ["réz.toml", "\U0001f600", "a?b"]


def test_lines_that_a_full_disk_keeps_rejecting_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(json_lines, "MOST_WAITING_BYTES", 40)
    Disk(monkeypatch, errno.ENOSPC, first=2, failures=1000)
    file = LineFile(tmp_path / "lines.jsonl")
    for step in range(1, 11):
        file.append({"step": step})
    file.close()
    assert read_lines(tmp_path / "lines.jsonl") == [{"step": 1}]
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert "lines.jsonl lacks 9 lines" in caplog.text


def test_a_disk_that_is_full_for_a_while_costs_a_run_no_line(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Disk(monkeypatch, errno.ENOSPC, first=1, failures=5)
    run_recipe("tiny", RUN)
    assert [line["step"] for line in metrics(in_tmp / "run")] == [1, 2, 4]
    assert [event["event"] for event in read_lines(in_tmp / "run/events.jsonl")] == ["start", *["spent"] * 4, "end"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_another_logger_survives_a_full_disk_too(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    write_distribution(in_tmp / "site", "broken-logger", BROKEN)
    monkeypatch.syspath_prepend(str(in_tmp / "site"))
    monkeypatch.delitem(sys.modules, "broken_logger", raising=False)
    import broken_logger

    full = iter([True])

    def fail(self: object, where: str) -> None:
        if where == "log" and next(full, False):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(broken_logger.Breaks, "fail", fail)
    run_recipe("tiny", RUN)
    messages = [line.getMessage() for line in caplog.records if "breaks" in line.getMessage()]
    assert messages == [
        f"observer 'breaks' failed and will be called again: {os.strerror(number)}",
        "observer 'breaks' works again after 1 failed calls",
    ]


def test_a_folder_that_cannot_be_written_is_reported_on_every_rank(gloo: GlooPool, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("{}\n")
    (tmp_path / "run/previous").write_text("in the way")
    with pytest.raises(RuntimeError) as caught:
        gloo.run(2, ranks_metrics, str(tmp_path))
    assert str(caught.value).count("titan_core.api.plugins.errors.UserError: job.dump_folder = 'run': run/previous") == 2
