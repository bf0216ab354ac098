"""The keys that titan-report adds to ``[metrics]``, and whether their libraries and servers are named."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field

from titan_core.api import ALL_KEYS, JobContext, Problem, RunFolder, Section


class TensorBoardKeys(Section):
    section: ClassVar[str] = "metrics"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    enable_tensorboard: bool = False
    """Write TensorBoard event files."""
    save_tb_folder: RunFolder = "logs/tensorboard"
    """Folder of the event files, below the run directory."""


class WandbKeys(Section):
    section: ClassVar[str] = "metrics"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    enable_wandb: bool = False
    """Log to Weights & Biases. A resumed job continues the same W&B run."""
    wandb_project: str = "titan"
    """Name of the W&B project."""
    wandb_entity: str | None = None
    """Owner of the W&B project. Default: the logged-in user."""
    wandb_name: str | None = None
    """Name of the W&B run. Default: the name of the run directory."""
    wandb_mode: Literal["online", "offline"] | None = None
    """"offline" writes to the run directory, for `wandb sync` later. Default: the environment variable WANDB_MODE."""


class MlflowKeys(Section):
    section: ClassVar[str] = "metrics"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    enable_mlflow: bool = False
    """Log to an MLflow server. A resumed job continues the same MLflow run."""
    mlflow_uri: str | None = None
    """Address of the server. Default: the environment variable MLFLOW_TRACKING_URI."""
    mlflow_experiment: str = Field(default="titan", min_length=1)
    """Name of the MLflow experiment, which is created if it does not exist."""
    mlflow_run: str | None = None
    """Name of the MLflow run. Default: the name of the run directory."""


class WebhookKeys(Section):
    section: ClassVar[str] = "metrics"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    enable_webhook: bool = False
    """Post a message to a URL when the run ends, fails, or its loss spikes."""
    webhook_url: str | None = None
    """The URL, which is treated as a secret. Default: the environment variable TITAN_WEBHOOK_URL."""
    webhook_events: list[Literal["end", "failure", "spike"]] = Field(default=["end", "failure", "spike"], max_length=3)
    """What is posted: the end of a run, an error that ended it, a loss that spikes or is not finite."""


def webhook_url(section: WebhookKeys) -> str | None:
    """Return the URL of the webhook, if it is set."""
    return section.webhook_url or os.environ.get("TITAN_WEBHOOK_URL") or None


def mlflow_uri(section: MlflowKeys) -> str | None:
    """Return the address of the MLflow server, if it is set."""
    return section.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI") or None


def check_tensorboard(context: JobContext[TensorBoardKeys]) -> Iterator[Problem]:
    """Check the library for ``metrics.enable_tensorboard``."""
    return _check(context, "tensorboard")


def check_wandb(context: JobContext[WandbKeys]) -> Iterator[Problem]:
    """Check the library for ``metrics.enable_wandb``."""
    return _check(context, "wandb")


def _check(context: JobContext[Any], library: str) -> Iterator[Problem]:
    if find_spec(library) is None:
        why, fix = f"the package {library} is not installed", f"install titan-report[{library}]"
        yield context.config.problem(f"metrics.enable_{library}", why, fix)


def check_webhook(context: JobContext[WebhookKeys]) -> Iterator[Problem]:
    """Check the URL for ``metrics.enable_webhook``."""
    return _check_url(context, webhook_url(context.section), "webhook", "webhook_url", "TITAN_WEBHOOK_URL")


def check_mlflow(context: JobContext[MlflowKeys]) -> Iterator[Problem]:
    """Check the address for ``metrics.enable_mlflow``."""
    return _check_url(context, mlflow_uri(context.section), "mlflow", "mlflow_uri", "MLFLOW_TRACKING_URI")


def _check_url(context: JobContext[Any], url: str | None, name: str, key: str, variable: str) -> Iterator[Problem]:
    """Check that ``url`` is one of HTTP. Messages do not contain it: it may be a secret."""
    fix = f"set metrics.{key}, or the environment variable {variable}, to a URL such as https://host/path"
    if url is None:
        yield context.config.problem(f"metrics.enable_{name}", "there is no URL to send to", fix)
    elif not _is_http(url):
        yield context.config.problem(f"metrics.enable_{name}", f"the value of {key} is not a URL of http or https", fix)


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port  # raises if it is no number
    except ValueError:
        return False
    printable = url.isascii() and url.isprintable() and " " not in url
    return printable and parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0
