"""``titan simulate`` and ``titan train --dry-run``: what they print; what cannot work fails as it would in training."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from tempfile import TemporaryFile

import pytest

from harness.fake_cuda import FakeCuda
from titan_core.cli.main import main
from titan_core.toolkit.processes import python

pytest.importorskip("titan_simulate")

from titan_simulate.cli.simulate import rank_argument

TINY = (
    "--model.args", "{dim = 32, n_layers = 2, n_heads = 2, n_kv_heads = 1, ffn_dim = 64}", "--training.seq_len", "32",
)  # fmt: skip


def titan(command: str, *arguments: str) -> tuple[int, str, str]:
    """Run a command in this process, which may fork. Its files stay redirected."""
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        status = main([command, "tiny", *TINY, *arguments])
        sys.stdout.flush()
        out.seek(0)
        err.seek(0)
        return status, out.read(), err.read()


def test_a_dry_run_prints_what_a_rank_needs_and_where_to_find_more(fake_cuda: FakeCuda) -> None:
    status, out, _ = fake_cuda.call(titan, "train", "--dry-run", "--world-size", "1", "--rank", "0")
    assert status == 0
    assert "rank 0 of 1 (one device): one step works" in out
    assert "MiB" in out and "activations" in out and "optimizer state" in out
    assert "titan simulate tiny --world-size 1 --full --model.args" in out


def test_simulate_prints_the_same_and_more_on_request(fake_cuda: FakeCuda) -> None:
    status, out, _ = fake_cuda.call(titan, "simulate", "--rank", "stages")
    assert status == 0 and out.count("one step works") == 1
    status, out, _ = fake_cuda.call(titan, "simulate", "--full")
    assert status == 0
    for said in ("GiB in step 2", "optimizer state", "at the peak", "launches"):
        assert said in out
    status, out, _ = fake_cuda.call(titan, "simulate", "--json")
    found = json.loads(out)
    assert status == 0 and found["world_size"] == 1 and [one["step"] for one in found["steps"]] == [1, 2]


def test_without_a_simulated_gpu_a_dry_run_tries_the_step_on_the_cpu() -> None:
    """As with a CPU build of torch."""
    lines = ("import sys", "from titan_core.cli.main import main", "from titan_simulate.engine import stub_libraries")
    code = "\n".join([*lines, "stub_libraries.reason = lambda: 'built without CUDA'", "sys.exit(main(sys.argv[1:]))"])
    command = python("-c", code, "train", "tiny", *TINY, "--dry-run", "--world-size", "1")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "note: no GPU can be simulated (built without CUDA); the step is tried as a job on CPUs" in done.stdout
    assert "rank 0 of 1 (one device): one step works" in done.stdout
    assert done.stdout.endswith("  not checked: memory, device syncs, and the code that only GPUs run\n")


def test_what_cannot_work_is_the_error_that_training_would_be(fake_cuda: FakeCuda) -> None:
    status, _, err = fake_cuda.call(titan, "train", "--dry-run", "--world-size", "4", "--rank", "4")
    assert status == 2
    assert "--rank 4: the job has 4 ranks" in err


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [("--rank", "3", "applies only to a dry run"), ("--world-size", "3", "applies only to a dry run")],
)
def test_its_options_need_it(option: str, value: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny", option, value]) == 2
    assert f"{option} {value}: {why}; add --dry-run" in capsys.readouterr().err


def test_a_rank_is_a_number_or_one_of_each_stage() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    rank_argument(parser)
    assert parser.parse_args(["--rank", "stages"]).rank == "stages"
    with pytest.raises(argparse.ArgumentError, match='neither a rank nor "stages"'):
        parser.parse_args(["--rank", "first"])
