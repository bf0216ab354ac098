"""``titan train --dry-run``: what it prints, and that what cannot work fails as it would in training."""

from __future__ import annotations

import argparse
import contextlib
import io

import pytest

from harness.fake_cuda import FakeCuda
from titan_core.cli.main import main

dry_run = pytest.importorskip("titan_simulate.cli.dry_run")

TINY = (
    "--model.args", "{dim = 32, n_layers = 2, n_heads = 2, n_kv_heads = 1, ffn_dim = 64}", "--training.seq_len", "32",
)  # fmt: skip


def titan(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["train", "tiny", *TINY, *arguments])
    return status, out.getvalue(), err.getvalue()


def test_a_dry_run_prints_what_a_rank_needs_and_where_to_find_more(fake_cuda: FakeCuda) -> None:
    status, out, _ = fake_cuda.call(titan, "--dry-run", "--world-size", "1", "--rank", "0")
    assert status == 0
    assert "rank 0 of 1 (one device): one step works" in out
    assert "MiB" in out and "activations" in out and "optimizer state" in out
    assert "titan simulate tiny --world-size 1 --model.args" in out


def test_what_cannot_work_is_the_error_that_training_would_be(fake_cuda: FakeCuda) -> None:
    status, _, err = fake_cuda.call(titan, "--dry-run", "--world-size", "4", "--rank", "4")
    assert status == 2
    assert "--rank 4: the job has 4 ranks" in err


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [("--rank", "3", "applies only to a dry run"), ("--world-size", "3", "applies only to a dry run")],
)
def test_its_options_need_it(option: str, value: str, why: str) -> None:
    status, _, err = titan(option, value)
    assert status == 2 and f"{option} {value}: {why}; add --dry-run" in err


def test_a_rank_is_a_number_or_one_of_each_stage() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    dry_run.arguments(parser)
    assert parser.parse_args(["--rank", "stages"]).rank == "stages"
    with pytest.raises(argparse.ArgumentError, match='neither a rank nor "stages"'):
        parser.parse_args(["--rank", "-1x"])
