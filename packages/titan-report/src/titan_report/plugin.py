"""The components that titan-report contributes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan_core.api import Command, Observer, Ref, hookimpl
from titan_report.config import MlflowKeys, TensorBoardKeys, WandbKeys, WebhookKeys

if TYPE_CHECKING:
    from titan_core.api import RunEnd
    from titan_core.api.observe.events import NextCommand

api = (1, 0)


@hookimpl
def titan_metric_loggers() -> list[Observer]:
    return [
        Observer(
            first_rank=True,
            may_fail=True,
            name="tensorboard",
            summary="TensorBoard event files in the run directory",
            config=TensorBoardKeys,
            build=Ref("titan_report.loggers.tensorboard:TensorBoardLog"),
            active=lambda context: context.section.enable_tensorboard,
            check=Ref("titan_report.config:check_tensorboard"),
        ),
        Observer(
            first_rank=True,
            may_fail=True,
            name="wandb",
            summary="Weights & Biases, online or offline",
            config=WandbKeys,
            build=Ref("titan_report.loggers.wandb:WandbLog"),
            active=lambda context: context.section.enable_wandb,
            check=Ref("titan_report.config:check_wandb"),
        ),
        Observer(
            first_rank=True,
            may_fail=True,
            name="mlflow",
            summary="MLflow, by the REST API of a server",
            config=MlflowKeys,
            build=Ref("titan_report.loggers.mlflow:MlflowLog"),
            active=lambda context: context.section.enable_mlflow,
            check=Ref("titan_report.config:check_mlflow"),
        ),
        Observer(
            first_rank=True,
            may_fail=True,
            name="webhook",
            summary="messages to a URL when a run ends, fails or spikes",
            config=WebhookKeys,
            build=Ref("titan_report.loggers.webhook:Webhook"),
            active=lambda context: context.section.enable_webhook,
            check=Ref("titan_report.config:check_webhook"),
        ),
    ]


@hookimpl
def titan_commands() -> list[Command]:
    return [
        Command(
            name="report",
            group="look",
            summary="write an HTML report about runs",
            arguments=Ref("titan_report.cli.report:arguments"),
            run=Ref("titan_report.cli.report:run"),
        ),
        Command(
            name="watch",
            group="look",
            summary="follow a run in the terminal",
            arguments=Ref("titan_report.cli.watch:arguments"),
            run=Ref("titan_report.cli.watch:run"),
        ),
        Command(
            name="compare",
            group="look",
            summary="train variants of a recipe and compare speed, memory and loss",
            arguments=Ref("titan_report.cli.compare:arguments"),
            run=Ref("titan_report.cli.compare:run"),
            overrides=True,
        ),
    ]


@hookimpl
def titan_next_commands(end: RunEnd) -> list[NextCommand]:
    from titan_core.api.observe.events import NextCommand

    return [NextCommand("see how it went", ("report", end.dump_folder))]
