"""The number of parameters that a run shows is that of its model, on any mesh."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from titan_core.cli.main import main
from titan_core.model.build import build_whole
from titan_core.model.counted_flops import size_of
from titan_core.toolkit.runs.run_log import RunLog
from titan_report.summary import summary
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import TINY, make_job, run_recipe

PARAMETERS, EMBEDDING = 37_024, 288 * 32
"""Of the model of ``TINY``: far fewer than its flavor ``debug`` has."""


def started(folder: str, overrides: dict[str, object]) -> dict[str, object]:
    """Train one step; return the start event."""
    os.chdir(folder)
    run_recipe("llama3_debug", {**TINY, "training.steps": 1, **overrides})
    event: dict[str, object] = json.loads(Path("outputs/llama3_debug/events.jsonl").read_text().splitlines()[0])
    return event


@pytest.mark.parametrize(
    "mesh", [{"parallelism.pipeline_parallel_degree": 2}, {"parallelism.data_parallel_shard_degree": 2}]
)
def test_the_start_event_counts_the_whole_model(gloo: GlooPool, tmp_path: Path, mesh: dict[str, object]) -> None:
    for event in gloo.run(2, started, str(tmp_path), mesh):
        assert event["model"] == "llama3 debug"
        assert (event["parameters"], event["non_embedding_parameters"]) == (PARAMETERS, PARAMETERS - EMBEDDING)


def test_console_watch_and_report_show_the_count(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_recipe("llama3_debug", {**TINY, "training.steps": 1})
    assert "model      llama3 debug (37.0K parameters), exactly 37,024; 27,808 without the embedding" in (
        capsys.readouterr().out
    )
    assert main(["watch", "--once", "outputs/llama3_debug"]) == 0
    assert "llama3 debug (37.0K parameters)" in capsys.readouterr().out
    (row,) = summary([RunLog.read("outputs/llama3_debug")], ["a"]).rows
    assert row[1] == "llama3 debug (37.0K parameters)"


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_embedding_counts_once(tied: bool, caplog: pytest.LogCaptureFixture) -> None:
    tie = "true" if tied else "false"
    job = make_job("llama3_debug", {**TINY, "model.args.tie_embeddings": tie})
    size = size_of(build_whole(job), job)
    assert size.parameters == job.model.num_params == PARAMETERS - tied * EMBEDDING
    assert size.non_embedding == PARAMETERS - EMBEDDING - tied * EMBEDDING
    assert not caplog.records


def test_a_wrong_declaration_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    job = make_job("llama3_debug", TINY)
    job = replace(job, model=replace(job.model, num_params=5))
    with caplog.at_level(logging.WARNING):
        size = size_of(build_whole(job), job)
    assert size.parameters == PARAMETERS
    assert "model 'llama3' has 37024 parameters, but its definition has num_params = 5" in caplog.text
