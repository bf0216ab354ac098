"""``titan estimate`` and ``titan plan`` of runs with ``[[stages]]``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.fake_cuda import why_not
from harness.staged import MODEL, write_recipe
from titan_core.api import UserError
from titan_core.api.config.resolved import Override
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.cli.invocation import Invocation
from titan_core.plugins.registry import Components
from titan_simulate.cli.plan_result import write_recipe as write_plan
from titan_simulate.cli.planned_stage import planned_stage
from titan_simulate.cli.stages import all_stages
from titan_simulate.estimate.stages import estimate_stages, number_of_stage, simulated_as

STAGES = (
    MODEL
    + """
[training]
dataset = "stdlib"
steps = 100
seq_len = 32
local_batch_size = 2
global_batch_size = 8

[checkpoint]
enable = true

[[stages]]
name = "long"
at_step = 20

[stages.training]
seq_len = 64

[[stages]]
name = "rates"
at_step = 50

[stages.lr_scheduler]
min_lr_factor = 0.5

[stages.optimizer]
lr = 1e-4

[[stages]]
name = "wide"
at_tokens = 30_000

[stages.training]
local_batch_size = 1

[stages.parallelism]
data_parallel_shard_degree = 4

[[stages]]
name = "never"
at_step = 200

[stages.training]
seq_len = 128
"""
)


def context_of(folder: Path, text: str = STAGES, overrides: Mapping[str, str] | None = None) -> Invocation:
    folder.mkdir(exist_ok=True)
    (folder / "staged.toml").write_text(text)
    options = argparse.Namespace(recipe=str(folder / "staged.toml"), world_size=None)
    given = [Override(key, value) for key, value in (overrides or {}).items()]
    return Invocation(options, Components.from_installed(), given)


def test_only_stages_whose_steps_differ_are_simulated(tmp_path: Path) -> None:
    context = context_of(tmp_path)
    stages = all_stages(context, context.job(4, missing_ok=True))
    assert simulated_as(stages) == {0: 0, 1: 1, 2: 1, 3: 3}  # not that of a stage without steps

    seen: list[str] = []

    def estimated(job: AssembledJob, place: str) -> Any:
        seen.append(place)
        return SimpleNamespace(step_seconds=float(job.batch.seq_len))

    found = estimate_stages(stages, estimated)
    assert seen == ["stage '1' (1 of 3)", "stage 'long' (2 of 3)", "stage 'wide' (3 of 3)"]
    # 49 steps of 512 tokens after the 5,120 of the first stage, 30,000 have been read
    assert [(one.name, one.first_step, one.end_step, one.tokens) for one in found] == [
        ("1", 0, 20, 20 * 256),
        ("long", 20, 50, 30 * 512),
        ("rates", 50, 69, 19 * 512),
        ("wide", 69, 100, 31 * 512),
    ]
    assert [one.seconds for one in found] == [(one.end_step - one.first_step) * one.estimate.step_seconds for one in found]
    assert sum(one.end_step - one.first_step for one in found) == 100
    assert [one.simulated_as for one in found] == ["1", "long", "long", "wide"]


def test_overrides_of_a_stage_replace_what_it_sets(tmp_path: Path) -> None:
    context = context_of(tmp_path)
    job = context.job(4, missing_ok=True)
    more = [Override("training.seq_len", "16"), Override("training.global_batch_size", "16")]
    stage = context.stage(job, 1, more, missing_ok=True)
    assert (stage.batch.seq_len, stage.batch.global_size, stage.stage) == (16, 16, 1)
    assert context.stage(job, 1, missing_ok=True).batch.seq_len == 64
    assert context.stage(job, 0, [Override("training.local_batch_size", "1")], missing_ok=True).batch.local_size == 1
    with pytest.raises(UserError, match=r"stage 'wide': .*global_batch_size"):
        context.stage(job, 3, [Override("training.global_batch_size", "2")], missing_ok=True)


def test_a_stage_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    job = context_of(tmp_path).job(4, missing_ok=True)
    with pytest.raises(UserError, match="the stages '1', 'long', 'rates', 'wide', 'never'"):
        number_of_stage(job, "lang")
    plain = context_of(tmp_path / "plain", STAGES.partition("[[stages]]")[0]).job(4, missing_ok=True)
    with pytest.raises(UserError, match=r"no \[\[stages\]\]"):
        number_of_stage(plain, "long")


def test_a_plan_decides_about_the_stages_that_inherit_it(tmp_path: Path) -> None:
    context = context_of(tmp_path)
    stage = planned_stage(context, 4, None)
    assert stage is not None
    assert stage.as_json() == {"name": "1", "also": ["long", "rates"], "not_planned": ["wide"]}
    assert "fit stages 'long', 'rates'" in stage.describe() and "not planned: stage 'wide'" in stage.describe()

    peaks: list[int] = []

    def estimate(job_of: Any) -> Any:
        job = job_of(())
        assert job.mesh.degree("tp") == 2  # the overrides reach every stage
        peaks.append(job.batch.seq_len)
        return SimpleNamespace(
            peak_gib=float(job.batch.seq_len), step_seconds=1.0, tokens_per_second_per_gpu=float(job.batch.seq_len), mfu=0.5
        )

    # The length of "long" is its own.
    more = [Override("parallelism.tensor_parallel_degree", "2"), Override("training.seq_len", "32")]
    found = stage.estimated(more, estimate, limit=80.0)
    assert peaks == [32, 64]  # the step of "rates" is that of "long"
    assert (found.peak_gib, found.largest, found.tokens_per_second_per_gpu) == (64.0, "long", 32.0)
    peaks.clear()
    assert stage.estimated(more, estimate, limit=16.0).largest == "1"
    assert peaks == [32]  # what is too large already is not simulated any further


def test_a_candidate_that_a_later_stage_refuses_is_refused(tmp_path: Path) -> None:
    text = STAGES.partition('[[stages]]\nname = "rates"')[0]
    text = text.replace("[stages.training]\nseq_len = 64", "[stages.training]\nglobal_batch_size = 4\nseq_len = 64")
    text = text.replace("[checkpoint]", "[parallelism]\ntensor_parallel_degree = 2\n\n[checkpoint]")
    stage = planned_stage(context_of(tmp_path, text), 4, None)
    assert stage is not None
    keys = "parallelism.data_parallel_shard_degree", "parallelism.tensor_parallel_degree", "training.local_batch_size"
    four = [Override(key, value) for key, value in zip(keys, ("4", "1", "2"), strict=True)]
    assert stage.job_of(four).batch.microbatches == 1
    with pytest.raises(UserError, match=r"stage 'long': .*global_batch_size = 4"):
        stage.checked(four)


def test_a_later_stage_is_planned_on_any_number_of_ranks_and_written_to_its_entry(tmp_path: Path) -> None:
    context = context_of(tmp_path)
    stage = planned_stage(context, 8, "wide")
    assert stage is not None and stage.as_json() == {"name": "wide", "also": [], "not_planned": []}
    with pytest.raises(UserError, match="stage 'wide'"):
        stage.job_of(())  # its own degree is for 4
    values = {"parallelism.data_parallel_shard_degree": 8, "compile.enable": True, "training.local_batch_size": None}
    job = stage.job_of([Override("parallelism.data_parallel_shard_degree", "8")])
    assert (job.mesh.world_size, job.batch.seq_len, job.stage) == (8, 64, 3)
    path = tmp_path / "planned.toml"
    write_plan(path, stage.config(context.config(), values), "titan plan", "why")
    written = tomllib.loads(path.read_text())
    assert written["stages"][2] == {
        "name": "wide", "at_tokens": 30_000, "parallelism": {"data_parallel_shard_degree": 8}, "compile": {"enable": True}
    }  # fmt: skip
    original = tomllib.loads(STAGES)["stages"]
    assert [written["stages"][number] for number in (0, 1, 3)] == [original[number] for number in (0, 1, 3)]
    assert "enable" not in written.get("compile", {})


def test_a_smaller_batch_has_logical_shards_of_its_own(tmp_path: Path) -> None:
    """Those of the run, which all its batches are multiples of, need not divide the batch that is simulated."""
    from titan_simulate.estimate.estimate import _reduction

    given = {"training.global_batch_size": "24", "training.local_batch_size": "1", "data.logical_shards": "24"}
    context = context_of(tmp_path, STAGES.partition("[[stages]]")[0], given)
    settings, factor, _ = _reduction(context.job(4, missing_ok=True), None, 3)
    smaller = context.job(4, [Override(key, value) for key, value in settings.items()], missing_ok=True)
    assert (smaller.batch.global_size, smaller.batch.logical_shards, factor) == (8, 8, 3.0)


def estimate_json(*words: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "titan_core", "estimate", *words, "--json"], capture_output=True, text=True, check=False
    )
    assert done.stdout, done.stderr
    return done.returncode, cast(dict[str, Any], json.loads(done.stdout))


@pytest.mark.long
def test_the_estimate_of_a_stage_is_that_of_a_job_with_its_values(in_tmp: Path) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    write_recipe(in_tmp)
    Path("staged.toml").write_text(STAGES)
    Path("plain.toml").write_text(STAGES.partition("[[stages]]")[0])
    status, whole = estimate_json("staged.toml", "--world-size", "4")
    assert status == 0 and whole["fits"]
    assert [one["simulated_as"] for one in whole["stages"]] == ["1", "long", "long", "wide"]
    assert whole["seconds"] == pytest.approx(sum(one["seconds"] for one in whole["stages"]))
    for name, more in {
        "1": (),
        "long": ("--training.seq_len", "64"),
        "wide": ("--training.seq_len", "64", "--training.local_batch_size", "1"),
    }.items():
        _, by_hand = estimate_json("plain.toml", "--world-size", "4", *more)
        _, alone = estimate_json("staged.toml", "--world-size", "4", "--stage", name)
        of_run = next(one["estimate"] for one in whole["stages"] if one["name"] == name)
        assert of_run == alone == by_hand
    Path("small.toml").write_text('base = "h100"\nname = "small"\nmemory_gib = 0.5\n')
    status, small = estimate_json("staged.toml", "--world-size", "4", "--device", "small.toml")
    assert status == 1 and not small["fits"]


@pytest.mark.long
def test_the_stages_of_a_large_run_have_a_row_each() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    words = [sys.executable, "-m", "titan_core", "estimate", "llama3_8b_stages", "--world-size", "64"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.endswith("  fits")]
    assert [row.split("  ")[0] for row in rows] == ["1", "8K", "16M tokens", "32K", "128K"]
    assert "total: " in done.stdout and "1,100,000 steps, 15.6T tokens" in done.stdout
