"""Weights & Biases."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import wandb

from titan_core.api import JobContext, Record, Run, RunEnd, hookimpl
from titan_core.api.config.secrets import redact
from titan_core.toolkit.device import device_name
from titan_core.toolkit.files import read_text
from titan_core.toolkit.runs.files import LOGS
from titan_report.config import WandbKeys

RUN_ID = "wandb_run_id"


class WandbLog:
    """Logs to one W&B run, however often the job is resumed. Its id is stored in the run directory."""

    def __init__(self, context: JobContext[WandbKeys]) -> None:
        self._section = context.section
        self._run: Any = None  # of W&B

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Begin the W&B run, or continue it."""
        section = self._section
        logs = Path(run.dump_folder) / LOGS
        logs.mkdir(parents=True, exist_ok=True)
        kept = logs / RUN_ID
        run_id = read_text(kept).strip() if kept.exists() else secrets.token_hex(4)
        self._run = wandb.init(
            project=section.wandb_project,
            entity=section.wandb_entity,
            name=section.wandb_name or Path(run.dump_folder).resolve().name,
            id=run_id,
            resume="allow",
            mode=section.wandb_mode,
            dir=str(logs),  # W&B 0.19 accepts no Path
            config=_identity(run),
            settings=wandb.Settings(console="off", quiet=True),
        )
        kept.write_text(run_id + "\n", encoding="utf-8")
        # W&B's own step counter never decreases, but a resumed run restarts at its checkpoint: log the step as a metric.
        self._run.define_metric("*", step_metric="step")

    @hookimpl
    def titan_metrics(self, record: Record) -> None:
        """Send the metrics of a step."""
        self._run.log({name: value for name, value in record.items() if value is not None})

    @hookimpl
    def titan_train_end(self, end: RunEnd) -> None:
        """Record how the run ended."""
        if self._run is not None:
            self._run.summary["ended"] = end.reason
            self._run.finish(exit_code=int(end.failed))


def _identity(run: Run) -> dict[str, Any]:
    """Return the resolved config by section, and the identity of the job under ``titan``."""
    job = run.job
    plugins = {f"{plugin['distribution']}:{plugin['name']}": plugin["version"] for plugin in job.plugin_versions()}
    titan = {
        "digest": job.digest(),
        "plugins": plugins,
        "world_size": job.mesh.world_size,
        "device": device_name(run.world.device),
    }
    return {**redact(job.config.as_dict()), "titan": titan}
