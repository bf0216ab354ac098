"""MLflow, by version 2.0 of its REST API: https://mlflow.org/docs/latest/rest-api.html."""

from __future__ import annotations

import base64
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from titan_core.api import JobContext, Record, Run, RunEnd, hookimpl
from titan_core.api.config.secrets import redact
from titan_core.toolkit.device import device_name
from titan_core.toolkit.files import read_text
from titan_core.toolkit.runs.files import LOGS
from titan_report.config import MlflowKeys, mlflow_uri
from titan_report.config_differences import flatten
from titan_report.loggers.outbox import TIMEOUT_SECONDS, DeliveryError, Outbox, send_json

RUN_ID = "mlflow_run_id"
WAITING = 1000
"""Records that may wait for the server."""
END_SECONDS = 10.0
"""How long the end of a run waits until the server has all records."""
_MOST_PARAMS, _LONGEST_PARAM = 100, 500
"""Limits of a request, and of values in the oldest servers of this API."""


class MlflowLog:
    """Logs to one MLflow run, however often the job is resumed. Its id is stored in the run directory."""

    def __init__(self, context: JobContext[MlflowKeys]) -> None:
        self._section = context.section
        uri = mlflow_uri(context.section)
        assert uri is not None  # checked
        self._api = f"{uri.rstrip('/')}/api/2.0/mlflow/"
        self._headers = _credentials()
        self._outbox = Outbox("mlflow", WAITING)
        self._begin: Callable[[], None] | None = None
        self._run_id = ""
        self._unsent: list[dict[str, Any]] = []
        """Requests of the beginning that the server has yet to receive: parts of the body."""

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Begin the MLflow run, or continue it."""
        kept = Path(run.dump_folder) / LOGS / RUN_ID
        name = self._section.mlflow_run or Path(run.dump_folder).resolve().name
        params = {key: str(value)[:_LONGEST_PARAM] for key, value in flatten(redact(run.job.config.as_dict())).items()}
        tags = {
            "titan.digest": run.job.digest(),
            "titan.world_size": str(run.job.mesh.world_size),
            "titan.device": device_name(run.world.device),
        }
        self._begin = partial(self._begin_run, kept, name, _pairs(params), _pairs(tags))
        self._send(dict)  # nothing more

    @hookimpl
    def titan_metrics(self, record: Record) -> None:
        """Send the metrics of a step."""
        at, step = round(1000 * (record.get("time") or time.time())), record["step"]
        metrics = [
            {"key": name, "value": float(value), "timestamp": at, "step": step}
            for name, value in record.items()
            if name not in ("step", "time") and value is not None and math.isfinite(value)
        ]
        self._send(lambda: self._post("runs/log-batch", metrics=metrics))

    @hookimpl
    def titan_train_end(self, end: RunEnd) -> None:
        """Record how the run ended."""
        if self._begin is not None:  # else it failed before its first step
            status = "FAILED" if end.failed else "KILLED" if end.preempted or end.interrupted else "FINISHED"
            ended = round(1000 * time.time())
            self._send(lambda: self._post("runs/set-tag", key="titan.ended", value=end.reason))
            self._send(lambda: self._post("runs/update", status=status, end_time=ended))
        self._outbox.close(END_SECONDS)

    def _send(self, request: Callable[[], object]) -> None:
        """Make a request from the thread, after those of the beginning."""

        def deliver() -> None:
            assert self._begin is not None
            self._begin()
            request()

        self._outbox.put(deliver)

    def _begin_run(self, kept: Path, name: str, params: Sequence[dict[str, str]], tags: Sequence[dict[str, str]]) -> None:
        """Create the run, or continue the one whose id is kept, unless that is done. MLflow refuses other values of
        parameters, so that they stay those of the first attempt."""
        if not self._run_id:
            if kept.exists():
                self._run_id = read_text(kept).strip()
                self._unsent = [{"tags": tags}]
                self._post("runs/update", status="RUNNING")
            else:
                experiment, now = self._experiment(), round(1000 * time.time())
                body = {"experiment_id": experiment, "run_name": name, "start_time": now}
                self._run_id = str(self._request("runs/create", body)["run"]["info"]["run_id"])
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(self._run_id + "\n", encoding="utf-8")
                self._unsent = [{"tags": tags}]
                self._unsent += [{"params": params[n : n + _MOST_PARAMS]} for n in range(0, len(params), _MOST_PARAMS)]
        while self._unsent:
            self._post("runs/log-batch", **self._unsent[-1])
            self._unsent.pop()

    def _experiment(self) -> str:
        """Return the id of the experiment, which is created if the server has none of its name."""
        name = self._section.mlflow_experiment
        query = urlencode({"experiment_name": name})
        try:
            found = send_json(f"{self._api}experiments/get-by-name?{query}", None, self._headers, TIMEOUT_SECONDS)
            return str(found["experiment"]["experiment_id"])
        except DeliveryError as error:
            if error.transient:
                raise
        return str(self._request("experiments/create", {"name": name})["experiment_id"])

    def _post(self, method: str, **body: Any) -> None:
        self._request(method, {"run_id": self._run_id, **body})

    def _request(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        return send_json(self._api + method, body, self._headers, TIMEOUT_SECONDS)


def _pairs(values: dict[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in values.items()]


def _credentials() -> dict[str, str]:
    """Return the header of the credentials that MLflow's own client takes from the environment, too."""
    if token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
        return {"Authorization": f"Bearer {token}"}
    user, password = os.environ.get("MLFLOW_TRACKING_USERNAME"), os.environ.get("MLFLOW_TRACKING_PASSWORD")
    if user is None or password is None:
        return {}
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}
