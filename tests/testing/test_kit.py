"""The kit by itself: jobs, merged records, and what a suite does without the packages that a row needs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from titan_core.cli.main import main
from titan_testing.checks.model import CHECKS
from titan_testing.jobs import RunRecord, make_job
from titan_testing.meshes import largest_differences, merged, require_equal
from titan_testing.pytest_plugin import RunJob
from titan_testing.settings import SMALL
from titan_testing.suites import CommandSuite, ScheduleSuite, TokenizerSuite
from titan_testing.suites.base import MESHES, Suite, require


class TestBytes(TokenizerSuite):
    tokenizer = "byte"


class TestWarmupStableDecay(ScheduleSuite):
    schedule = "wsd"
    settings: ClassVar = {"lr_scheduler.warmup_steps": 4, "lr_scheduler.decay_ratio": 0.5, "optimizer.lr": 0.004}
    expected: ClassVar = {1: 0.001, 2: 0.002, 4: 0.004}


class TestPlugins(CommandSuite):
    command = "plugins"
    works = ([], ["--json"])
    refused = (["--no-such-option"], ["surplus"])


@pytest.mark.parametrize("check", CHECKS)
def test_a_right_model_passes_each_check(check: str) -> None:
    assert CHECKS[check](make_job("tiny", dict(SMALL), 1))


def test_a_row_that_needs_a_missing_package_is_skipped() -> None:
    with pytest.raises(pytest.skip.Exception, match="needs titan-parallel"):
        require(MESHES["TP 2"].needs)


def test_a_job_on_two_ranks_is_one_record(run_job: RunJob) -> None:
    record = run_job("tiny", SMALL)
    assert len(record.losses) == 3
    assert set(record.initial) == set(record.gradients) == set(record.final)


def test_a_gradient_that_differs_is_named() -> None:
    one = RunRecord([2.0], [1.0], initial={"w": torch.ones(2)}, gradients={"w": torch.ones(2)}, final={"w": torch.ones(2)})
    other = RunRecord([2.0], [1.0], initial={"w": torch.ones(2)}, gradients={"w": torch.tensor([1.0, 1.1])})
    assert largest_differences(merged([other]), one).endswith("gradients within 7.1e-02 (w)")
    with pytest.raises(AssertionError, match=r"gradient of parameter 'w' differs from one device's by 7"):
        require_equal([other], one)
    lost = RunRecord(
        [2.0], [1.0], initial={"v": torch.ones(2), "w": torch.ones(2)},
        gradients={"v": torch.ones(2), "w": torch.full((2,), torch.nan)},
    )  # fmt: skip
    right = RunRecord([2.0], [1.0], initial=lost.initial, gradients={"v": torch.ones(2), "w": torch.ones(2)})
    with pytest.raises(AssertionError, match="gradient of parameter 'w' differs from one device's by nan"):
        require_equal([lost], right)
    require_equal([replace(other, final=one.final, tolerance=0.08)], one)  # as its transforms declare
    norms = replace(one, grad_norms=[1.1])
    with pytest.raises(AssertionError, match=r"the gradient norm of step 1 is 1\.1, and 1 on one device"):
        require_equal([norms], one)
    with pytest.raises(AssertionError, match="starts from other values"):
        require_equal([RunRecord([2.0], [1.0], initial={"w": torch.zeros(2)})], one)


def test_a_row_that_should_be_refused_and_trains_fails(run_job: RunJob) -> None:
    class Wrong(Suite):
        unsupported: ClassVar = {"row": "anything"}

    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        Wrong().require_refused("row", run_job, SMALL, 1)


@pytest.mark.parametrize(("imported", "passed"), [("math", True), ("torch", False)])
def test_a_plugin_that_is_a_file_is_imported_by_itself(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], imported: str, passed: bool
) -> None:
    hook = "@titan_core.api.hookimpl\ndef titan_step_end(): pass\n"
    Path("one_file.py").write_text(f"import {imported}\nimport titan_core.api\napi = (1, 0)\n\n{hook}")
    assert main(["--plugin", "one_file.py", "plugin", "check", "one_file", "--json"]) == (0 if passed else 2)
    checks = {check["check"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["import"]["passed"] is passed
    assert passed or "one_file: imports torch, which every start of Titan would wait for" in checks["import"]["detail"]
