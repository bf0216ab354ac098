"""The rules of an MLflow server, as far as a logger can tell."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, urlsplit

from harness.http_server import Answer


class Rules:
    """Answers requests, and keeps what they say."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}

    def __call__(self, path: str, body: Any) -> Answer:
        parts = urlsplit(path)
        assert parts.path.startswith("/api/2.0/mlflow/")
        method = parts.path.removeprefix("/api/2.0/mlflow/")
        if method == "experiments/get-by-name":
            (name,) = parse_qs(parts.query)["experiment_name"]
            if name not in self.experiments:
                return 404, {"error_code": "RESOURCE_DOES_NOT_EXIST"}
            return 200, {"experiment": {"experiment_id": self.experiments[name]}}
        if method == "experiments/create":
            self.experiments[body["name"]] = f"e{len(self.experiments)}"
            return 200, {"experiment_id": self.experiments[body["name"]]}
        if method == "runs/create":
            assert body["experiment_id"] in self.experiments.values()
            run_id = f"r{len(self.runs)}"
            self.runs[run_id] = {**body, "status": "RUNNING", "params": {}, "tags": {}, "metrics": []}
            return 200, {"run": {"info": {"run_id": run_id}}}
        run = self.runs[body.pop("run_id")]
        if method == "runs/update":
            run |= body
        elif method == "runs/set-tag":
            run["tags"][body["key"]] = body["value"]
        else:
            assert method == "runs/log-batch"
            params = {one["key"]: one["value"] for one in body.get("params", [])}
            assert len(params) <= 100 and all(len(value) <= 500 for value in params.values())
            if any(run["params"].get(key, value) != value for key, value in params.items()):
                return 400, {"error_code": "INVALID_PARAMETER_VALUE"}
            run["params"] |= params
            run["tags"] |= {one["key"]: one["value"] for one in body.get("tags", [])}
            run["metrics"] += body.get("metrics", [])
        return 200, {}


def series(run: dict[str, Any], name: str) -> list[tuple[int, float]]:
    """Return the steps and values of a metric."""
    return [(one["step"], one["value"]) for one in run["metrics"] if one["key"] == name]
