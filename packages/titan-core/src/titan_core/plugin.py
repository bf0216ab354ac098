"""titan-core's own components, registered through the same hooks as a third party's."""

from __future__ import annotations

from titan_core.api import (
    Command,
    Dataset,
    HealthCheck,
    LRSchedule,
    Objective,
    Observer,
    Optimizer,
    OptimizerSection,
    Ref,
    Tokenizer,
    hookimpl,
)
from titan_core.api.config.sections import LRSchedulerSection, MetricsSection, TrainingSection

api = (1, 0)


@hookimpl
def titan_datasets() -> list[Dataset]:
    return [
        Dataset(
            name="stdlib",
            summary="source text of Python's standard library; needs no network",
            build=Ref("titan_core.data.stdlib:open_stdlib"),
            check=Ref("titan_core.data.stdlib:check_stdlib"),
        ),
    ]


@hookimpl
def titan_tokenizers() -> list[Tokenizer]:
    return [
        Tokenizer(
            name="byte",
            summary="one token per byte; needs no file",
            build=Ref("titan_core.data.byte_tokenizer:build"),
        ),
    ]


@hookimpl
def titan_optimizers() -> list[Optimizer]:
    return [
        Optimizer(
            name="AdamW",
            summary="Adam with decoupled weight decay",
            config=OptimizerSection,
            build=Ref("titan_core.optim.adam:build_adamw"),
            costs=Ref("titan_core.optim.costs:of_adam"),
        ),
        Optimizer(
            name="Adam",
            summary="Adam",
            config=OptimizerSection,
            build=Ref("titan_core.optim.adam:build_adam"),
            costs=Ref("titan_core.optim.costs:of_adam"),
        ),
    ]


@hookimpl
def titan_objectives() -> list[Objective]:
    return [
        Objective(
            name="next_token",
            summary="cross entropy of the next token",
            build=Ref("titan_core.model.next_token:build"),
        ),
    ]


@hookimpl
def titan_lr_schedules() -> list[LRSchedule]:
    return [
        LRSchedule(
            name="wsd",
            summary="warmup, stable, decay",
            config=LRSchedulerSection,
            build=Ref("titan_core.optim.lr_schedule:build_wsd"),
        ),
    ]


@hookimpl
def titan_metric_loggers() -> list[Observer]:
    return [
        Observer(
            first_rank=True,
            may_fail=True,
            name="console",
            summary="lines and a progress bar",
            config=MetricsSection,
            build=Ref("titan_core.runlog.console:ConsoleLog"),
            active=lambda context: context.section.enable_console,
        ),
        Observer(
            first_rank=True,
            may_fail=True,
            name="jsonl",
            summary="metrics.jsonl in the run's directory",
            build=Ref("titan_core.runlog.reporter:MetricsFile"),
            active=lambda context: True,
        ),
    ]


@hookimpl
def titan_debuggers() -> list[Observer]:
    return [
        Observer(
            name="finite_guard",
            summary="stops the run, or skips the update, when the loss or gradient norm is not finite",
            config=TrainingSection,
            build=Ref("titan_core.loop.finite_guard:FiniteGuard"),
            active=lambda context: context.section.on_nan != "ignore",
        ),
        Observer(
            name="replicas",
            summary="ends a run in which ranks that must hold the same weights hold others",
            build=Ref("titan_core.loop.replicas:ReplicaCheck"),
            active=lambda context: context.job.mesh.world_size > 1,
        ),
    ]


@hookimpl
def titan_health_checks() -> list[HealthCheck]:
    return [
        HealthCheck(
            name="plugins",
            summary="plugins that cannot be used, and components of one name",
            check=Ref("titan_core.cli.plugins:check_health"),
        ),
        HealthCheck(
            name="names",
            summary="packages and commands of other projects with Titan's names",
            check=Ref("titan_core.plugins.names:check_health"),
        ),
    ]


@hookimpl
def titan_commands() -> list[Command]:
    recipe: Ref = Ref("titan_core.toolkit.arguments:recipe_arguments")  # type: ignore[type-arg]
    return [
        Command(
            name="train",
            group="train",
            summary="train a recipe",
            arguments=recipe,
            run=Ref("titan_core.cli.train:run"),
            overrides=True,
            launches=True,
        ),
        Command(
            name="plugins",
            group="plugins",
            summary="list installed and broken plugins",
            arguments=Ref("titan_core.toolkit.arguments:json_argument"),
            run=Ref("titan_core.cli.plugins:run"),
        ),
        Command(
            name="recipes",
            group="train",
            summary="list recipes",
            arguments=Ref("titan_core.toolkit.arguments:json_argument"),
            run=Ref("titan_core.cli.plugins:list_recipes"),
        ),
        Command(
            name="config show",
            group="train",
            summary="print the resolved config as TOML",
            arguments=recipe,
            run=Ref("titan_core.cli.job:show_config"),
            overrides=True,
        ),
        Command(
            name="config check",
            group="train",
            summary="check whether a job is valid",
            arguments=Ref("titan_core.cli.job:arguments"),
            run=Ref("titan_core.cli.job:check"),
            overrides=True,
        ),
        Command(
            name="job show",
            group="train",
            summary="print the job that a recipe assembles to",
            arguments=Ref("titan_core.cli.job:arguments"),
            run=Ref("titan_core.cli.job:show"),
            overrides=True,
        ),
        Command(
            name="model show",
            group="data and models",
            summary="print a model's layout, and the meshes that divide it",
            arguments=Ref("titan_core.cli.model_show:arguments"),
            run=Ref("titan_core.cli.model_show:show"),
            overrides=True,
        ),
    ]
