"""MLflow across a run that stops and resumes: a server that keeps MLflow's rules, and MLflow's own.

For the latter: ``TITAN_TEST_MLFLOW="uvx --from mlflow mlflow" uv run pytest -m long tests/integration/test_mlflow.py``.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from harness.http_server import serving
from harness.mlflow_rules import Rules, series
from titan_core.toolkit.json_lines import read_lines
from titan_report.loggers import mlflow
from titan_testing import PATIENCE
from titan_testing.jobs import TINY, run_recipe

RUN: dict[str, object] = {
    **TINY, "job.dump_folder": "run", "metrics.enable_mlflow": "true", "metrics.log_freq": 1, "job.description": "x" * 900,
    "checkpoint.enable": "true", "checkpoint.interval": 2,
}  # fmt: skip
OWN = os.environ.get("TITAN_TEST_MLFLOW")
"""The command of MLflow."""


def test_a_run_and_its_continuation(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow, "END_SECONDS", 60.0)
    rules = Rules()
    with serving(rules) as server:
        settings = {**RUN, "metrics.mlflow_uri": server.url + "/", "metrics.mlflow_experiment": "a study"}
        run_recipe("tiny", {**settings, "training.stop_at_step": 2})
        (run,) = rules.runs.values()
        assert run["status"] == "FINISHED" and run["tags"]["titan.ended"]
        run_recipe("tiny", {**settings, "job.description": "changed"})
    assert list(rules.experiments) == ["a study"] and list(rules.runs) == ["r0"]
    assert (in_tmp / "run/logs/mlflow_run_id").read_text() == "r0\n"
    assert run["run_name"] == "run" and run["status"] == "FINISHED"
    assert run["params"]["training.seq_len"] == "32" and run["params"]["job.description"] == "x" * 500
    assert run["tags"]["titan.world_size"] == "1" and run["end_time"] >= run["start_time"]
    lines = [line for line in read_lines(in_tmp / "run/metrics.jsonl") if "loss" in line]
    for name in ("loss", "grad_norm", "tokens_seen"):
        assert series(run, name) == [(line["step"], line[name]) for line in lines]
    assert [one["timestamp"] for one in run["metrics"] if one["key"] == "loss"] == [
        round(1000 * line["time"]) for line in lines
    ]


@pytest.mark.long
@pytest.mark.skipif(OWN is None, reason="TITAN_TEST_MLFLOW does not name the command of MLflow")
def test_the_server_of_mlflow(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow, "TIMEOUT_SECONDS", 30.0)
    monkeypatch.setattr(mlflow, "END_SECONDS", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = ["--backend-store-uri", f"sqlite:///{in_tmp}/mlflow.db", "--artifacts-destination", str(in_tmp / "artifacts")]
    command = [*shlex.split(OWN or ""), "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1", *store]
    server = subprocess.Popen(command, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + PATIENCE
        while not _is_up(url):
            assert server.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        settings = {**RUN, "metrics.mlflow_uri": url}
        run_recipe("tiny", {**settings, "training.stop_at_step": 2})
        run_recipe("tiny", {**settings, "job.description": "changed"})
        run_id = (in_tmp / "run/logs/mlflow_run_id").read_text().strip()
        run = _get(f"{url}/api/2.0/mlflow/runs/get?run_id={run_id}")["run"]
        assert run["info"]["status"] == "FINISHED" and run["info"]["run_name"] == "run"
        params = {one["key"]: one["value"] for one in run["data"]["params"]}
        assert params["training.seq_len"] == "32" and params["job.description"] == "x" * 500
        tags = {one["key"]: one["value"] for one in run["data"]["tags"]}
        assert tags["titan.world_size"] == "1" and tags["titan.ended"]
        history = _get(f"{url}/api/2.0/mlflow/metrics/get-history?run_id={run_id}&metric_key=loss")["metrics"]
        lines = [line for line in read_lines(in_tmp / "run/metrics.jsonl") if "loss" in line]
        assert [(one["step"], one["value"]) for one in history] == [(line["step"], line["loss"]) for line in lines]
    finally:
        os.killpg(server.pid, 9)
        server.wait()


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as response:
        return json.load(response)


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False
