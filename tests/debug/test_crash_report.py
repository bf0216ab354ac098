"""The page about a failed run: the order of its sections, and which secrets it omits."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from harness.contexts import job_context
from harness.gloo_pool import GlooPool
from harness.jobs import run_recipe
from titan_core.api import Run, UserError, hookimpl
from titan_core.toolkit.errors import caused_by_peer
from titan_debug.crash import rank_files, report as crash_report
from titan_debug.crash.environment import command_line, relevant_variables
from titan_debug.crash.page import Context, RankCrash, first_crashes, page
from titan_debug.crash.rank_files import CrashFiles
from titan_debug.crash.report import CrashReport

RUN: dict[str, object] = {
    "model.args": "{dim = 32, n_layers = 2, n_heads = 2, n_kv_heads = 1, ffn_dim = 64}",
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.steps": 5,
    "lr_scheduler.warmup_steps": 2,
    "job.device": "cpu",
    "job.dump_folder": "run",
    "metrics.log_freq": 1,
    "comm.train_timeout_seconds": 3,
}
CRASH = Path("run/debug/crash")


class Fault:
    def __init__(self, act: Callable[[], object], hook: str = "step") -> None:
        self._act, self._hook = act, hook

    @hookimpl
    def titan_job_assembled(self) -> None:
        if self._hook == "assembled":
            self._act()

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        if self._hook == "step" and step == 3:
            self._act()


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        try:
            json.loads("{")
        except ValueError as error:
            raise RuntimeError("the index is unreadable") from error


def interrupt() -> None:
    raise KeyboardInterrupt


def refuse() -> None:
    raise UserError.one("the data", "it is damaged", "restore it")


def ends_with(folder: str, fault: Fault) -> str:
    os.chdir(folder)
    try:
        return run_recipe("tiny", RUN, observers=[fault]).reason
    except BaseException as error:  # noqa: BLE001 - the test compares its type
        return type(error).__name__


def test_the_original_failure_is_on_top_and_its_consequences_are_folded(gloo: GlooPool, tmp_path: Path) -> None:
    assert gloo.run(2, ends_with, str(tmp_path), Fault(fail_on_rank_1)) == ["RuntimeError"] * 2
    text = (tmp_path / CRASH / "report.md").read_text()
    assert text.startswith("# Rank 1 failed in step 3: RuntimeError\n")
    top, _, rest = text.partition("## Other ranks")
    assert "Rank 0 failed as a consequence of another rank's failure." in top
    assert "RuntimeError: the index is unreadable" in top
    assert "json.decoder.JSONDecodeError: Expecting property name" in top  # the chained exception
    assert "mesh coordinates: dp_shard 1" in top
    assert "<details>\n<summary>rank 0: RuntimeError: " in rest
    assert '"step": 2,' in rest and "[training]\n" in rest and "titan-debug 0." in rest
    assert "RANK = 1" in rest and "torch = 2." in rest
    report = json.loads((tmp_path / CRASH / "rank-1.json").read_text())
    assert (report["rank"], report["step"], report["type"], report["follows"]) == (1, 3, "RuntimeError", False)


def test_a_run_of_one_rank_has_a_page_and_logs_its_path(in_tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UserError):
        run_recipe("tiny", RUN, observers=[Fault(refuse)])
    text = (in_tmp / CRASH / "report.md").read_text()
    assert "the data: it is damaged; restore it\n" in text
    assert "Traceback" not in text  # a user's mistake needs no traceback
    logged = [record.getMessage() for record in caplog.records if "crash report" in record.getMessage()]
    assert logged == ["rank 0 failed in step 3; the crash report is run/debug/crash/report.md"]


@pytest.mark.parametrize("fault", [Fault(interrupt), Fault(refuse, "assembled")], ids=["interrupt", "before training"])
def test_no_page_for_an_interrupt_or_before_training(in_tmp: Path, fault: Fault) -> None:
    with pytest.raises((KeyboardInterrupt, UserError)):
        run_recipe("tiny", RUN, observers=[fault])
    assert not (in_tmp / "run" / "debug").exists()


def test_a_page_that_cannot_be_written_does_not_hide_the_error(in_tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
    def block() -> None:
        CRASH.parent.mkdir(exist_ok=True)
        CRASH.write_text("a file in the folder's place")
        raise ValueError("the error itself")

    with pytest.raises(ValueError, match="the error itself"):
        run_recipe("tiny", RUN, observers=[Fault(block)])
    assert "cannot write the crash report: [Errno 17] File exists" in caplog.text
    assert "Traceback" not in caplog.text


def crash(rank: int, time: float, follows: bool = False) -> RankCrash:
    lines = ["Traceback (most recent call last):", f"ValueError: of rank {rank} ```"]
    message, environment = f"of rank {rank}", {"RANK": str(rank)}
    return RankCrash(
        rank, 4, 1.0, time, "node", 10 + rank, 7, "ValueError", message, lines, follows, {}, environment, "titan train"
    )


def test_a_cause_comes_before_its_consequences_even_if_these_were_detected_earlier() -> None:
    crashes = [crash(0, time=1.0, follows=True), crash(3, time=3.0), crash(2, time=2.0)]
    assert [crash.rank for crash in first_crashes(crashes)] == [2, 3, 0]
    text = page(crashes, Context("[job]\n", [], [], "rank 2 raised ValueError", "outputs/run"))
    assert text.startswith("# Rank 2 failed in step 7: ValueError\n")
    assert "No report from rank 1. Possible reasons: killed" in text
    assert "Collectives and threads: rank 2 raised ValueError" in text
    assert "````\nTraceback" in text  # a fence within the traceback does not end the block


class DistBackendError(RuntimeError):
    """Stands in for torch's class, which Python cannot construct."""


@pytest.mark.parametrize(
    ("error", "follows"),
    [
        (RuntimeError("[...pair.cc:561] Connection closed by peer [127.0.0.1]:43699. This is typically caused by"), True),
        (RuntimeError("[...unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"), True),
        (RuntimeError("[...pair.cc:545] Read error [10.0.0.1]:4: Connection reset by peer"), True),
        (DistBackendError("NCCL error: ncclRemoteError: A call failed possibly due to a network error"), True),
        (DistBackendError("NCCL error: ncclInvalidUsage: this usually reflects invalid usage"), False),
        (ConnectionResetError("Connection reset by peer"), False),  # a dataset's own
        (ValueError("a loss of Timed out waiting 5ms"), False),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_an_error_that_reports_a_lost_peer_is_a_consequence(error: Exception, follows: bool) -> None:
    assert caused_by_peer(error) is follows
    wrapped = UserError.one("the run", "it ended")
    wrapped.__cause__ = error
    assert caused_by_peer(wrapped) is follows


def test_secrets_are_omitted() -> None:
    found = relevant_variables(
        {
            "TITAN_API_KEY": "s3cret", "SLURM_JWT": "s3cret", "TORCHX_AUTH": "s3cret", "NCCL_DEBUG": "INFO", "RANK": "0",
            "TITAN_PROXY": "https://user:s3cret@host", "HF_TOKEN": "s3cret", "HOME": "/x", "SLURM_JOB_ID": "7",
        }
    )  # fmt: skip
    assert found == {
        "NCCL_DEBUG": "INFO", "RANK": "0", "SLURM_JOB_ID": "7", "SLURM_JWT": "(redacted)", "TITAN_API_KEY": "(redacted)",
        "TITAN_PROXY": "https://(redacted)@host", "TORCHX_AUTH": "(redacted)",
    }  # fmt: skip
    shown = command_line(["titan", "--wandb.api_key", "s3cret", "--x.password=s3cret", "--model.tokenizer", "byte"])
    assert "s3cret" not in shown and shown.endswith("--model.tokenizer byte")


def deny() -> None:
    raise ConnectionError("https://user:s3cret@host has refused\nAuthorization: Bearer s3cret-s3cret")


def test_no_file_of_the_report_contains_a_secret_of_the_config_or_the_error(in_tmp: Path) -> None:
    described = {**RUN, "job.description": "the one of https://user:s3cret@host/wiki"}
    with pytest.raises(ConnectionError):
        run_recipe("tiny", described, observers=[Fault(deny)])
    assert 'description = "the one of https://(redacted)@host/wiki"' in (CRASH / "report.md").read_text()
    for file in (CRASH / "report.md", CRASH / "rank-0.json"):
        text = file.read_text()
        assert "s3cret" not in text and "https://(redacted)@host has refused" in text


CLOSED = RuntimeError("[...pair.cc:561] Connection closed by peer [127.0.0.1]:43699.")
"""The error of a rank that lost its peer."""


class Ranks:
    """The crash reporters of a job's ranks, all in this process."""

    def __init__(self, folder: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._size = size
        config = SimpleNamespace(as_dict=dict, section=lambda cls: SimpleNamespace(save_traces_folder="none"))
        self._job = SimpleNamespace(config=config, plugin_versions=list)

    def fail(self, rank: int, error: Exception) -> None:
        """Report ``error`` as the trainer of ``rank`` does."""
        mesh = SimpleNamespace(names=())
        world = SimpleNamespace(rank=rank, size=self._size, mesh=mesh, device=torch.device("cpu"))
        run = SimpleNamespace(world=world, job=self._job, dump_folder=str(self._folder), step=3, attempt=1.0)
        report = CrashReport(job_context())
        report.titan_train_start(cast(Run, run))
        report.titan_exception(error)

    def page(self) -> str:
        """Return the page after all writers have finished."""
        for thread in threading.enumerate():
            if thread.name == "crash report":
                thread.join()
        return (self._folder / "debug/crash/report.md").read_text()


def test_the_last_version_of_the_page_includes_reports_that_arrived_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(tmp_path, 2, monkeypatch)
    meanwhile = [lambda: ranks.fail(1, ValueError("the cause"))]

    def slow_page(*given: Any) -> str:
        text = page(*given)
        if meanwhile:  # rank 1 reports and writes its own page just before rank 0 puts this one in place
            meanwhile.pop()()
        return text

    monkeypatch.setattr(crash_report, "page", slow_page)
    ranks.fail(0, CLOSED)
    text = ranks.page()
    assert text.startswith("# Rank 1 failed in step 3: ValueError\n")
    assert "No report" not in text


@pytest.mark.parametrize("order", [[1, 2, 0, 3], [0, 1, 2, 3], [3, 2, 0, 1]], ids=str)
def test_the_page_is_correct_whichever_rank_fails_last(
    order: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(tmp_path, 4, monkeypatch)
    for rank in order:
        ranks.fail(rank, ValueError("the cause") if rank == 1 else CLOSED)
        time.sleep(0.02)
    text = ranks.page()
    assert text.startswith("# Rank 1 failed in step 3: ValueError\n")
    assert "Ranks 0, 2-3 failed as a consequence of another rank's failure." in text and "No report" not in text


def test_a_page_is_written_if_every_rank_only_lost_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(tmp_path, 4, monkeypatch)
    for rank in (3, 2, 1):  # rank 0 was killed
        ranks.fail(rank, CLOSED)
    text = ranks.page()
    assert "no rank has reported the original failure" in text and "No report from rank 0. Possible" in text
    assert "<summary>rank 2" in text or "<summary>rank 3" in text


@pytest.mark.parametrize("error", [CLOSED, FileNotFoundError("/data")], ids=["consequences", "original failures"])
def test_if_many_ranks_fail_at_once_only_a_few_read_the_others_files(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, cause = 200, 150
    ranks = Ranks(tmp_path, size, monkeypatch)
    analysed: list[object] = []
    monkeypatch.setattr(CrashReport, "_verdict", lambda self, run: (analysed.append(run), "a verdict")[1])
    monkeypatch.setattr(rank_files, "MOST_READ", 20)
    for module in (rank_files, crash_report):
        monkeypatch.setattr(module, "QUIET", 5.0)  # so long that all ranks fail within it on any machine
    read: list[Path] = []
    parse = rank_files._crash
    monkeypatch.setattr(rank_files, "_crash", lambda file: (read.append(file), parse(file))[1])
    ranks.fail(cause, ValueError("the cause"))
    others = [rank for rank in range(size) if rank != cause]
    random.Random(0).shuffle(others)
    for rank in others:
        ranks.fail(rank, error)
    text = ranks.page()
    assert text.startswith(f"# Rank {cause} failed in step 3: ValueError\n")
    assert "The directory of this page has files of" in text and "No report" not in text
    assert "Collectives and threads: a verdict" in text
    assert len(list((tmp_path / "debug/crash").glob("rank-*.json"))) == size
    assert len(analysed) <= 30  # twice for each of the few ranks that fail before every lower rank
    assert len(read) <= 30 * 41


def test_files_of_an_earlier_attempt_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "debug/crash"
    for old in (crash(0, time=0.5), crash(2, time=0.5, follows=True)):
        CrashFiles(folder, 0.5, 4).add(dataclasses.replace(old, attempt=0.5))
    for file in folder.iterdir():
        os.utime(file, (1.0, 1.0))
    ranks = Ranks(tmp_path, 3, monkeypatch)
    ranks.fail(2, ValueError("the cause"))
    ranks.fail(1, CLOSED)
    text = ranks.page()
    assert (
        text.startswith("# Rank 2 failed in step 3: ValueError\n")
        and "No report from rank 0. Possible reasons: killed" in text
    )
    assert sorted(file.name for file in folder.glob("rank-*")) == ["rank-0.json", "rank-1-follows.json", "rank-2.json"]
