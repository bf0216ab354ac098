"""The webhook, against real servers: one that works, one that hangs, one that fails, and none."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from harness.http_server import serving
from titan_core.api import Finding, StepReport, UserError, hookimpl
from titan_core.loop.training import train
from titan_report.loggers import outbox, webhook
from titan_testing.jobs import TINY, make_job, run_recipe

RUN: dict[str, object] = {**TINY, "job.dump_folder": "run", "metrics.enable_webhook": "true"}
PATH = "/services/T0/s3cret-path"


def settings(url: str, **more: object) -> dict[str, object]:
    return {**RUN, "metrics.webhook_url": url, **more}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry at once; a busy machine may need longer than a run waits at its end."""
    monkeypatch.setattr(outbox, "RETRY_SECONDS", (0.01, 0.01))
    monkeypatch.setattr(webhook, "END_SECONDS", 60.0)


class Trouble:
    """Reports findings, and may raise in step 2."""

    def __init__(self, findings: int = 0, error: Exception | None = None) -> None:
        self._findings, self._error = findings, error
        self.steps: list[float] = []

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        self._run = run

    @hookimpl
    def titan_step_end(self, report: StepReport) -> None:
        self.steps.append(time.monotonic())
        if report.step == 1:
            for number in range(self._findings):
                self._run.report(Finding("loss spike", f"spike {number}", report.step))
            self._run.report(Finding("trace", "a trace is no spike", report.step))
        elif report.step == 2 and self._error is not None:
            raise self._error


def test_the_end_of_a_run(in_tmp: Path) -> None:
    with serving() as server:
        record = run_recipe("tiny", settings(server.url + PATH))
    ((method, path, body, headers),) = server.requests
    assert (method, path, headers["content-type"]) == ("POST", PATH, "application/json")
    assert {
        "event": "end",
        "step": 4,
        "steps": 4,
        "completed": True,
        "run": "run",
        "host": socket.gethostname(),
    }.items() <= (body.items())
    assert body["loss"] == pytest.approx(record.losses[-1]) and abs(body["time"] - time.time()) < 600
    alone = run_recipe("tiny", {**TINY, "job.dump_folder": "alone"})
    assert alone.losses == record.losses and alone.grad_norms == record.grad_norms
    assert body["text"] == f"run, step 4 of 4: {record.reason}, loss {record.losses[-1]:.4f}"


def test_a_spike_and_the_failure_after_it(in_tmp: Path) -> None:
    error = ValueError("no read access to https://user:s3cret@host/data\nsecond line")
    with serving() as server, pytest.raises(ValueError, match="no read access"):
        train(make_job("tiny", settings(server.url)), [Trouble(1, error)])
    spike, failure = server.bodies
    assert (spike["event"], spike["kind"], spike["step"]) == ("spike", "loss spike", 1)
    assert spike["text"] == "run, step 1 of 4: loss spike: spike 0"
    assert (failure["event"], failure["step"]) == ("failure", 2)
    assert failure["error"] == "ValueError: no read access to https://(redacted)@host/data"


def test_only_the_events_that_are_wanted(in_tmp: Path) -> None:
    with serving() as server:
        train(make_job("tiny", settings(server.url, **{"metrics.webhook_events": '["spike"]'})), [Trouble(2)])
    assert [body["event"] for body in server.bodies] == ["spike", "spike"]


def test_a_failure_before_the_first_step(in_tmp: Path) -> None:
    class Early:
        @hookimpl
        def titan_train_start(self, run: Any) -> None:
            raise ValueError("too early")

    with serving() as server, pytest.raises(ValueError, match="too early"):
        train(make_job("tiny", settings(server.url)), [Early()])
    assert [body["event"] for body in server.bodies] == ["failure"]


def test_a_server_that_fails_is_asked_again(in_tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([500, 429, 200])
    with serving(lambda path, body: (next(answers), {})) as server:
        run_recipe("tiny", settings(server.url))
    assert len(server.requests) == 3 and len({json.dumps(body) for body in server.bodies}) == 1
    assert "lost" not in caplog.text
    with serving(lambda path, body: (500, {})) as server:
        run_recipe("tiny", settings(server.url))
    assert len(server.requests) == 3
    assert "webhook: a message is lost: the server answers 500; training continues" in caplog.text


@pytest.mark.parametrize("status", [302, 404])
def test_a_refusal_is_final_and_a_redirect_is_not_followed(
    in_tmp: Path, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    with serving() as elsewhere, serving(lambda path, body: (status, elsewhere.url)) as server:
        run_recipe("tiny", settings(server.url))
    assert len(server.requests) == 1 and elsewhere.requests == []
    assert f"the server answers {status}" in caplog.text


def test_a_server_that_hangs_does_not_hold_up_training(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(webhook, "TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(webhook, "END_SECONDS", 2.0)
    observer = Trouble(webhook.WAITING + 20)
    with serving(lambda path, body: None) as server:
        began = time.monotonic()
        train(make_job("tiny", settings(server.url)), [observer])
        ended = time.monotonic()
    assert len(observer.steps) == 4
    assert ended - observer.steps[-1] < webhook.END_SECONDS + 5 and observer.steps[-1] - began < 60
    assert 1 <= len(server.requests) <= 6
    assert "webhook: a message is lost: it is slower than the run" in caplog.text
    assert "messages were not delivered by the end of the run" in caplog.text


def test_no_server(in_tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    record = run_recipe("tiny", settings(f"http://127.0.0.1:{port}{PATH}"))
    assert len(record.losses) == 4
    assert "webhook: a message is lost: the server cannot be reached: Connection refused" in caplog.text
    assert "s3cret" not in caplog.text


def test_the_url_is_a_secret(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG), serving(lambda path, body: (403, {})) as server:
        run_recipe("tiny", settings(server.url + PATH, **{"metrics.enable_tensorboard": "true"}))
        monkeypatch.setenv("TITAN_WEBHOOK_URL", server.url + PATH)
        run_recipe("tiny", {**RUN, "job.dump_folder": "other"})
        assert [path for _, path, *_ in server.requests] == [PATH, PATH]
    files = [file for file in in_tmp.rglob("*") if file.is_file()]
    assert len(files) > 8 and not [file for file in files if b"s3cret" in file.read_bytes()]
    shown = capsys.readouterr()
    assert "s3cret" not in shown.out + shown.err + caplog.text


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize(
    "url",
    ["file:///etc/s3cret", "ftp://host/s3cret", "host/s3cret", "http://", "https://host:x/s3cret", "http://host/s3 cret"],
)
def test_what_is_no_url_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(UserError) as caught:
        make_job("tiny", settings(url))
    (problem,) = map(str, caught.value.problems)
    assert "metrics.enable_webhook = true: the value of webhook_url is not a URL of http or https; set" in problem
    assert "s3" not in problem
    with pytest.raises(
        UserError, match=r"there is no URL to send to; set metrics\.webhook_url, or the environment variable"
    ):
        make_job("tiny", RUN)


def test_threads_end_with_the_run(in_tmp: Path) -> None:
    with serving() as server:
        run_recipe("tiny", settings(server.url))
    assert not [thread for thread in threading.enumerate() if thread.name == "titan-webhook"]


def test_a_run_that_sigterm_ends_posts_its_end(in_tmp: Path) -> None:
    class Signals:
        @hookimpl
        def titan_step_end(self, report: StepReport) -> None:
            if report.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    with serving() as server:
        train(make_job("tiny", settings(server.url)), [Signals()])
    (body,) = server.bodies
    assert body["event"] == "end" and not body["completed"] and body["reason"] in body["text"]


def test_a_text_mentions_nobody(in_tmp: Path) -> None:
    """As Slack, Mattermost and Discord read a text: no link, channel or person; addresses stay readable."""
    error = ValueError("<!channel> <https://evil.example|log in> @here me@host.org")
    with serving() as server, pytest.raises(ValueError, match="channel"):
        train(make_job("tiny", settings(server.url)), [Trouble(1, error)])
    _, failure = server.bodies
    assert failure["text"].endswith("\u2039!channel\u203a \u2039https://evil.example|log in\u203a @\u200bhere me@host.org")
    assert failure["error"] == f"ValueError: {error}"
