"""What `titan analyse` says about a failed run: the order of its sections, and which secrets it omits."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from titan_core.api import UserError, hookimpl
from titan_core.cli.main import main
from titan_core.toolkit.errors import caused_by_peer
from titan_debug.crash.recorder import command_line, relevant_variables
from titan_debug.crash.report import RankCrash, Report, crash_folder, write_crash
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import run_recipe

RUN: dict[str, object] = {
    "model.args": "{dim = 32, n_layers = 2, n_heads = 2, n_kv_heads = 1, ffn_dim = 64}", "training.seq_len": 32,
    "training.local_batch_size": 2, "training.steps": 5, "lr_scheduler.warmup_steps": 2, "job.device": "cpu",
    "job.dump_folder": "run", "metrics.log_freq": 1, "comm.train_timeout_seconds": 3,
}  # fmt: skip
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


@pytest.mark.full
def test_the_original_failure_is_on_top_and_its_consequences_follow(gloo: GlooPool, tmp_path: Path) -> None:
    assert gloo.run(2, ends_with, str(tmp_path), Fault(fail_on_rank_1)) == ["RuntimeError"] * 2
    text = Report.read(str(tmp_path / "run")).page()
    assert text.startswith("# Rank 1 failed in step 3: RuntimeError\n")
    top, _, rest = text.partition("## Other ranks")
    assert "RuntimeError: the index is unreadable" in top
    assert "json.decoder.JSONDecodeError: Expecting property name" in top  # the chained exception
    assert "mesh coordinates: dp_shard 1" in top
    assert "* rank 0: RuntimeError: " in rest and "(a consequence of another rank's failure)" in rest
    assert '"step": 2,' in rest and "[training]\n" in rest and "titan-debug" in rest
    assert "RANK = 1" in rest and "torch = 2." in rest
    report = json.loads((tmp_path / CRASH / "rank-1.json").read_text())
    assert (report["rank"], report["step"], report["type"], report["follows"]) == (1, 3, "RuntimeError", False)


def test_a_run_of_one_rank_is_reported_and_logs_the_command(
    in_tmp: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError):
        run_recipe("tiny", RUN, observers=[Fault(refuse)])
    logged = [record.getMessage() for record in caplog.records if "titan analyse" in record.getMessage()]
    assert logged == ["rank 0 failed in step 3; `titan analyse run` shows why, and in which environment"]
    capsys.readouterr()
    assert main(["analyse", "run"]) == 0
    text = capsys.readouterr().out
    assert "the data: it is damaged; restore it\n" in text
    assert "Traceback" not in text  # a user's mistake needs no traceback
    assert main(["analyse", "run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["failures"][0]["type"] == "UserError" and found["collectives"] is None


@pytest.mark.parametrize("fault", [Fault(interrupt), Fault(refuse, "assembled")], ids=["interrupt", "before training"])
def test_an_interrupt_and_a_mistake_before_training_leave_no_file(in_tmp: Path, fault: Fault) -> None:
    with pytest.raises((KeyboardInterrupt, UserError)):
        run_recipe("tiny", RUN, observers=[fault])
    assert not (in_tmp / "run" / "debug").exists()


@pytest.mark.full
def test_a_file_that_cannot_be_written_does_not_hide_the_error(in_tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
    def block() -> None:
        CRASH.parent.mkdir(exist_ok=True)
        CRASH.write_text("a file in the folder's place")
        raise ValueError("the error itself")

    with pytest.raises(ValueError, match="the error itself"):
        run_recipe("tiny", RUN, observers=[Fault(block)])
    assert "cannot record the failure: [Errno 17] File exists" in caplog.text
    assert "Traceback" not in caplog.text


def crash(rank: int, time: float, follows: bool = False, attempt: float = 1.0) -> RankCrash:
    lines = ["Traceback (most recent call last):", f"ValueError: of rank {rank} ```"]
    message, environment = f"of rank {rank}", {"RANK": str(rank)}
    return RankCrash(
        rank, 4, attempt, time, "node", 10 + rank, 7, "ValueError", message, lines, follows, {}, environment, "titan train"
    )


def reported(run: Path, *crashes: RankCrash) -> str:
    for one in crashes:
        write_crash(crash_folder(run), one)
    return Report.read(str(run)).page()


def test_a_cause_comes_before_its_consequences_even_if_these_were_detected_earlier(tmp_path: Path) -> None:
    text = reported(tmp_path, crash(0, time=1.0, follows=True), crash(3, time=3.0), crash(2, time=2.0))
    assert text.startswith("# Rank 2 failed in step 7: ValueError\n")
    assert "No report from rank 1. Possible reasons: killed" in text
    others = text.partition("## Other ranks")[2]
    assert 0 < others.index("* rank 3: ValueError: of rank 3\n") < others.index("* rank 0: ValueError: of rank 0 (a conseq")
    assert "````\nTraceback" in text  # a fence within the traceback does not end the block


def test_many_ranks_that_fail_alike_take_one_line(tmp_path: Path) -> None:
    text = reported(tmp_path, *(crash(rank, time=1.0 + rank, follows=rank > 0) for rank in range(4)))
    assert "* ranks 1-3: ValueError: of rank 1 (a consequence of another rank's failure)\n" in text


def test_a_run_whose_ranks_only_lost_another_says_so(tmp_path: Path) -> None:
    text = reported(tmp_path, *(crash(rank, time=1.0, follows=True) for rank in (3, 2, 1)))  # rank 0 was killed
    assert "no rank has reported the original failure" in text and "No report from rank 0. Possible" in text


def test_files_of_an_earlier_attempt_and_damaged_ones_are_named_and_ignored(tmp_path: Path) -> None:
    (crash_folder(tmp_path) / "rank-3.json").mkdir(parents=True)
    text = reported(tmp_path, crash(2, time=0.5, attempt=0.5), crash(1, time=2.0, follows=True))
    assert text.startswith("# Rank 1 failed in step 7") and "No report from ranks 0, 2-3. Possible reasons: killed" in text
    assert "note: ignored rank-3.json, which cannot be read: " in text
    assert "note: ignored rank 2's failure of an earlier attempt" in text


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


def test_no_file_of_the_report_contains_a_secret_of_the_config_the_command_or_the_error(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    description = "the one of https://user:s3cret@host/wiki?token=s3cret#access_token=s3cret"
    monkeypatch.setattr("sys.argv", ["titan", "train", "tiny", "--job.description", description])
    monkeypatch.setenv("TITAN_PROXY", "https://user:s3cret@host?api_key=s3cret")
    with pytest.raises(ConnectionError):
        run_recipe("tiny", {**RUN, "job.description": description}, observers=[Fault(deny)])
    page = Report.read("run").page()
    assert 'description = "the one of https://(redacted)@host/wiki' in page
    assert "--job.description 'the one of https://(redacted)@host/wiki?token=(redacted)" in page
    for text in (page, (CRASH / "rank-0.json").read_text()):
        assert "s3cret" not in text and "https://(redacted)@host has refused" in text
