"""The page about a failed run: what it has on top, and what it leaves out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from harness.gloo_pool import GlooPool
from harness.jobs import run_recipe
from titan_core.errors import UserError
from titan_core.hookspecs import hookimpl
from titan_debug.consequences import follows_from_a_peer
from titan_debug.crash_page import Context, RankCrash, first_crashes, page
from titan_debug.environment import command_line, relevant_variables, without_secrets

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
        return run_recipe("llama3_debug", RUN, observers=[fault]).reason
    except BaseException as error:  # noqa: BLE001 - the test looks at it
        return type(error).__name__


def test_the_first_failure_is_on_top_and_what_followed_is_folded(gloo: GlooPool, tmp_path: Path) -> None:
    assert gloo.run(2, ends_with, str(tmp_path), Fault(fail_on_rank_1)) == ["RuntimeError"] * 2
    text = (tmp_path / CRASH / "report.md").read_text()
    assert text.startswith("# Rank 1 failed in step 3: RuntimeError\n")
    top, _, rest = text.partition("## The other ranks")
    assert "What rank 0 raised follows from another rank's failure." in top
    assert "RuntimeError: the index is unreadable" in top
    assert "json.decoder.JSONDecodeError: Expecting property name" in top  # what it came from
    assert "place in the mesh: dp_shard 1" in top
    assert "<details>\n<summary>rank 0: RuntimeError: " in rest
    assert '"step": 2,' in rest and "[training]\n" in rest and "titan-debug 0." in rest
    assert "RANK = 1" in rest and "torch = 2." in rest
    report = json.loads((tmp_path / CRASH / "rank-1.json").read_text())
    assert (report["rank"], report["step"], report["type"], report["follows"]) == (1, 3, "RuntimeError", False)


def test_a_run_of_one_rank_has_one_too_and_says_where(in_tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UserError):
        run_recipe("llama3_debug", RUN, observers=[Fault(refuse)])
    text = (in_tmp / CRASH / "report.md").read_text()
    assert "the data: it is damaged; restore it\n" in text
    assert "Traceback" not in text  # a mistake of the user's is told in a line
    told = [record.getMessage() for record in caplog.records if "crash report" in record.getMessage()]
    assert told == ["rank 0 failed in step 3; the crash report is run/debug/crash/report.md"]


@pytest.mark.parametrize("fault", [Fault(interrupt), Fault(refuse, "assembled")], ids=["interrupt", "before training"])
def test_there_is_none_for_an_interrupt_and_before_training(in_tmp: Path, fault: Fault) -> None:
    with pytest.raises((KeyboardInterrupt, UserError)):
        run_recipe("llama3_debug", RUN, observers=[fault])
    assert not (in_tmp / "run" / "debug").exists()


def test_what_cannot_be_written_hides_no_error(in_tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
    def block() -> None:
        CRASH.parent.mkdir(exist_ok=True)
        CRASH.write_text("a file in the folder's place")
        raise ValueError("the error itself")

    with pytest.raises(ValueError, match="the error itself"):
        run_recipe("llama3_debug", RUN, observers=[Fault(block)])
    assert "failed in titan_exception" in caplog.text


def crash(rank: int, time: float, follows: bool = False) -> RankCrash:
    lines = ["Traceback (most recent call last):", f"ValueError: of rank {rank} ```"]
    message, environment = f"of rank {rank}", {"RANK": str(rank)}
    return RankCrash(
        rank, 4, 1.0, time, "node", 10 + rank, 7, "ValueError", message, lines, follows, {}, environment, "titan train"
    )


def test_a_consequence_never_comes_before_its_cause_even_if_it_was_noticed_earlier() -> None:
    crashes = [crash(0, time=1.0, follows=True), crash(3, time=3.0), crash(2, time=2.0)]
    assert [one.rank for one in first_crashes(crashes)] == [2, 3, 0]
    text = page(crashes, Context("[job]\n", [], [], "rank 2 raised ValueError", "outputs/run"))
    assert text.startswith("# Rank 2 failed in step 7: ValueError\n")
    assert "No report from rank 1:" in text
    assert "Collectives and threads: rank 2 raised ValueError" in text
    assert "````\nTraceback" in text  # a traceback with a fence of its own does not end the block


class DistBackendError(RuntimeError):
    """As torch's, which cannot be made from Python."""


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
def test_an_error_that_says_that_a_peer_is_gone_is_a_consequence(error: Exception, follows: bool) -> None:
    assert follows_from_a_peer(error) is follows
    wrapped = UserError.one("the run", "it ended")
    wrapped.__cause__ = error
    assert follows_from_a_peer(wrapped) is follows


def test_secrets_are_left_out() -> None:
    found = relevant_variables(
        {"TITAN_API_KEY": "s3cret", "NCCL_DEBUG": "INFO", "RANK": "0", "HF_TOKEN": "s3cret", "HOME": "/x"}
    )
    assert found == {"NCCL_DEBUG": "INFO", "RANK": "0", "TITAN_API_KEY": "(left out)"}
    shown = command_line(["titan", "--wandb.api_key", "s3cret", "--x.password=s3cret", "--model.tokenizer", "byte"])
    assert "s3cret" not in shown and shown.endswith("--model.tokenizer byte")
    toml = without_secrets('[wandb]\napi_key = "s3cret"\nproject = "p"\n[model]\ntokenizer = "byte"\n')
    assert "s3cret" not in toml and 'project = "p"' in toml and 'tokenizer = "byte"' in toml
