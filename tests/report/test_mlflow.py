"""MLflow: what a server receives that keeps the rules of MLflow, fails, hangs, or comes late."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

import pytest

from harness.http_server import Answer, serving
from harness.mlflow_rules import Rules, series
from titan_core.api import StepReport, UserError, hookimpl
from titan_core.loop.training import train
from titan_report.loggers import mlflow, outbox
from titan_testing.jobs import TINY, make_job, run_recipe

RUN: dict[str, object] = {
    **TINY, "job.dump_folder": "run", "metrics.enable_mlflow": "true", "metrics.log_freq": 1, "job.description": "x" * 900,
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(outbox, "RETRY_SECONDS", (0.01, 0.01))
    monkeypatch.setattr(mlflow, "END_SECONDS", 60.0)


def test_a_failed_run_and_one_of_a_server_that_comes_late(in_tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        @hookimpl
        def titan_step_end(self, report: StepReport) -> None:
            if report.step == 3:
                raise ValueError("gone")

    rules, refused = Rules(), iter(range(3))  # the first batch of the beginning, with its repetitions

    def answer(path: str, body: Any) -> Answer:
        return (503, {}) if path.endswith("/log-batch") and next(refused, None) is not None else rules(path, body)

    with serving(answer) as server, pytest.raises(ValueError, match="gone"):
        train(make_job("tiny", {**RUN, "metrics.mlflow_uri": server.url}), [Failing()])
    (run,) = rules.runs.values()
    assert run["status"] == "FAILED"
    assert [step for step, _ in series(run, "loss")] == [1, 2]
    assert "mlflow: works again; 1 messages were lost" in caplog.text
    assert run["params"]["training.seq_len"] == "32" and run["params"]["job.description"] == "x" * 500


@pytest.mark.parametrize("answer", [None, (500, {}), (401, {})], ids=["hangs", "fails", "refuses"])
def test_training_does_not_need_the_server(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answer: Any
) -> None:
    monkeypatch.setattr(mlflow, "TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(mlflow, "END_SECONDS", 2.0)
    with serving(lambda path, body: answer) as server:
        began = time.monotonic()
        record = run_recipe("tiny", {**RUN, "metrics.mlflow_uri": server.url})
        assert time.monotonic() - began < 60
    assert record.losses == run_recipe("tiny", {**TINY, "job.dump_folder": "alone"}).losses
    assert "mlflow: " in caplog.text and not (in_tmp / "run/logs/mlflow_run_id").exists()


def test_credentials_come_from_the_environment(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "s3cret")
    rules = Rules()
    with serving(rules) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
        run_recipe("tiny", RUN)
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "s3cret-token")
        described = {"job.dump_folder": "again", "job.description": "data of https://me:s3cret@host"}
        run_recipe("tiny", {**RUN, **described})
    given = list(dict.fromkeys(headers["authorization"] for *_, headers in server.requests))
    assert given == ["Basic " + base64.b64encode(b"me:s3cret").decode(), "Bearer s3cret-token"]
    assert not [file for file in in_tmp.rglob("*") if file.is_file() and b"s3cret" in file.read_bytes()]
    assert rules.runs["r1"]["params"]["job.description"] == "data of https://(redacted)@host"
    assert not any("s3cret" in json.dumps(body) for body in server.bodies)


def test_an_address_is_needed() -> None:
    with pytest.raises(UserError, match=r"no URL to send to; set metrics\.mlflow_uri, or .* MLFLOW_TRACKING_URI"):
        make_job("tiny", RUN)
    with pytest.raises(UserError, match="the value of mlflow_uri is not a URL of http or https"):
        make_job("tiny", {**RUN, "metrics.mlflow_uri": "sqlite:///mlflow.db"})
