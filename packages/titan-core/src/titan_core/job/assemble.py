"""Config and plugins to a job: pick components by name, check them against each other. Pure, and free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from titan_core.api.checkpoint import Checkpoint
from titan_core.api.components import (
    DATA_DIMS,
    Component,
    Debugger,
    LRSchedule,
    Model,
    Objective,
    Optimizer,
    Tokenizer,
    Transform,
)
from titan_core.api.config import Config
from titan_core.api.errors import PluginFailure, Problem, UserError
from titan_core.api.job import Job
from titan_core.api.job_facts import JobFacts
from titan_core.api.layout import ModelDefinition
from titan_core.api.mesh import MeshDim, MeshPlan, MeshView
from titan_core.api.metric_log import MetricLogger
from titan_core.api.sections import (
    DataSection,
    ModelSection,
    OptimizerSection,
    TrainingSection,
)  # fmt: skip
from titan_core.api.tokenizer import TextTokenizer
from titan_core.config.problems import problems_of
from titan_core.job.batch_plan import plan_batch
from titan_core.job.data_plan import pick_datasets, pick_validation, plan_stream, tokenizer_context
from titan_core.job.mesh_plan import plan_mesh
from titan_core.plugins.providers import provider
from titan_core.plugins.registry import Registry

C = TypeVar("C", bound=Component)
R = TypeVar("R")


def assemble(config: Config, registry: Registry, world_size: int | None = None) -> Job:
    """Decide everything about the job that ``config`` describes.

    Args:
        world_size: number of ranks; ``None`` takes the smallest world that the config allows.

    Raises:
        UserError: every problem that could be found, in one error.
    """
    registry.require_sound()
    problems: list[Problem] = []

    def attempt(make: Callable[..., R], *arguments: object) -> R | None:
        """Collect what is wrong instead of ending at the first mistake."""
        try:
            return make(*arguments)
        except UserError as error:
            problems.extend(error.problems)
            return None

    model = attempt(_pick, config, registry, Model, "model.name")
    args = attempt(model_args, config, model) if model is not None else None
    definition = attempt(define_model, model, args) if model is not None and args is not None else None
    tokenizer = attempt(_pick, config, registry, Tokenizer, "model.tokenizer")
    text_tokenizer = attempt(_build_tokenizer, config, tokenizer) if tokenizer is not None else None
    datasets = attempt(pick_datasets, config, registry, text_tokenizer)
    validation = attempt(pick_validation, config, registry, text_tokenizer)
    objective = attempt(_pick, config, registry, Objective, "objective.name")
    optimizer = attempt(_pick, config, registry, Optimizer, "optimizer.name")
    lr_schedule = attempt(_pick, config, registry, LRSchedule, "lr_scheduler.name")
    mesh = attempt(_plan_mesh, config, registry, world_size)
    batch = attempt(plan_batch, config, mesh.batch_degree) if mesh is not None else None
    if definition is not None:
        problems += check_sizes(config, definition, text_tokenizer)
        problems += check_document_mask(config, definition)
    problems += check_param_groups(config)
    if mesh is None or batch is None or definition is None:
        raise UserError(*problems)

    facts = JobFacts(config, mesh, batch, definition)
    active = [transform for transform in registry.all(Transform) if transform.active(transform.context(facts))]
    problems += check_served(facts, active, registry)
    problems += check_reduced(facts, active)
    loggers = [one for one in registry.all(MetricLogger) if one.active(one.context(facts))]
    debuggers = [one for one in registry.all(Debugger) if one.active(one.context(facts))]
    objectives = [] if objective is None else [objective]
    checked: list[Transform | MetricLogger | Debugger | Objective] = [*active, *loggers, *debuggers, *objectives]
    for component in checked:
        if component.check is not None:
            problems += component.check.load()(component.context(facts))
    checkpoints = [one for one in registry.all(Checkpoint) if one.active(one.context(facts))]
    if len(checkpoints) > 1:
        names = ", ".join(one.name for one in checkpoints)
        problems.append(Problem(f"checkpoints {names}", "a job has one checkpoint format", "switch one off"))
    if problems:
        raise UserError(*problems)
    assert model and args and datasets and tokenizer and text_tokenizer and objective and optimizer and lr_schedule
    stream = plan_stream(config, tokenizer, batch, datasets)
    return Job(
        facts=facts,
        registry=registry,
        model=model,
        model_args=args,
        transforms=tuple(sorted(active, key=lambda one: (one.phase, one.name))),
        data=stream,
        validation=replace(stream, datasets=(validation,), on_end="once") if validation is not None else None,
        tokenizer=tokenizer,
        text_tokenizer=text_tokenizer,
        objective=objective,
        optimizer=optimizer,
        lr_schedule=lr_schedule,
        checkpoint=checkpoints[0] if checkpoints else None,
        loggers=tuple(loggers),
        debuggers=tuple(debuggers),
    )


def _pick(config: Config, registry: Registry, kind: type[C], key: str) -> C:
    name = config.value(key)
    if name not in registry.names(kind):
        why = registry.unknown(kind) if name else f"no {kind.kind} is chosen, and no single one is installed"
        raise UserError(config.problem(key, why, registry.suggest(kind, name)))
    return registry.get(kind, name)


def _plan_mesh(config: Config, registry: Registry, world_size: int | None) -> MeshPlan:
    transforms = registry.all(Transform)
    dims = [dim for transform in transforms for dim in transform.mesh_dims]
    views = [view for transform in transforms for view in transform.mesh_views]
    return plan_mesh(config, dims, world_size, views)


def define_model(model: Model, args: BaseModel) -> ModelDefinition:
    """The model of this size.

    Raises:
        UserError: its code cannot be imported, or refuses the arguments.
    """
    return model.define.load()(args)


def model_args(config: Config, model: Model) -> BaseModel:
    """The model's flavor with ``[model.args]`` applied.

    Raises:
        UserError: no such flavor, or arguments that the model refuses.
    """
    section = config.section(ModelSection)
    if section.flavor not in model.flavors:
        flavors = ", ".join(model.flavors)
        raise UserError(config.problem("model.flavor", f"model {model.name!r} has no such flavor", f"it has {flavors}"))
    args: BaseModel = model.flavors[section.flavor]
    cls = type(args)
    try:
        args = cls.model_validate(_merged(args.model_dump(), section.args), strict=True)
    except ValidationError as error:
        raise UserError(*problems_of(error, "model.args", cls, section.args, config.where)) from None
    return args


def _merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``values`` with ``changes``; tables within tables are merged too."""
    merged = dict(values)
    for key, change in changes.items():
        inner = merged.get(key)
        merged[key] = _merged(inner, change) if isinstance(inner, dict) and isinstance(change, dict) else change
    return merged


def _build_tokenizer(config: Config, tokenizer: Tokenizer) -> TextTokenizer:
    path = config.section(ModelSection).tokenizer_path
    try:
        return tokenizer.build.load()(tokenizer_context(config, tokenizer))
    except PluginFailure:
        raise
    except UserError as error:
        where = config.where("model.tokenizer_path", path) if path else config.where("model.tokenizer", tokenizer.name)
        raise UserError(*(Problem(where, one.why, one.fix) for one in error.problems)) from error


def check_sizes(config: Config, model: ModelDefinition, tokenizer: TextTokenizer | None) -> Iterator[Problem]:
    """Whether the sequences and the vocabulary fit the model."""
    layout = model.layout
    if config.section(TrainingSection).seq_len > layout.max_seq_len:
        yield config.problem(
            "training.seq_len",
            f"the model takes at most {layout.max_seq_len} tokens",
            "shorten it, or give the model a longer context with model.args",
        )
    if tokenizer is not None and tokenizer.vocab_size > layout.vocab_size:
        yield config.problem(
            "model.tokenizer",
            f"its vocabulary has {tokenizer.vocab_size} tokens, and the model's only {layout.vocab_size}",
            "choose another tokenizer or flavor, or set the model's vocabulary with model.args",
        )


def check_document_mask(config: Config, model: ModelDefinition) -> Iterator[Problem]:
    """Whether the model can keep attention inside of documents."""
    if config.section(DataSection).document_mask and not model.layout.masks_documents:
        why = f"model {config.section(ModelSection).name!r} cannot keep attention inside of a document"
        yield config.problem("data.document_mask", why, "switch it off, or let the model's layout and mixers know documents")


def check_param_groups(config: Config) -> Iterator[Problem]:
    """Whether each pattern can decide for a parameter."""
    groups = config.section(OptimizerSection).param_groups or []
    if len({group.pattern for group in groups}) < len(groups):
        yield config.problem("optimizer.param_groups", "a pattern stands there twice, and the first always wins", "drop one")


def check_served(facts: JobFacts, active: list[Transform], registry: Registry) -> Iterator[Problem]:
    """Whether every degree above 1, mixed precision and offloading are made real by a transform: never silently ignored."""
    served = {key for transform in active for key in transform.serves}
    named: tuple[MeshDim | MeshView, ...] = (*facts.mesh.dims, *facts.mesh.views)
    asked = [one.degree_key for one in named if facts.mesh.degree(one.name) > 1]
    training = facts.section(TrainingSection)
    for key in ("mixed_precision_param", "mixed_precision_reduce", "enable_cpu_offload"):
        if getattr(training, key) != type(training).model_fields[key].default:
            asked.append(f"training.{key}")
    for key in asked:
        if key in served:
            continue
        shown = facts.config.value(key)
        why = "no plugin in use provides it"
        if shown == -1:
            dim = next(dim for dim in facts.mesh.dims if dim.degree_key == key)
            why = f"{facts.mesh.degrees[dim.name]} processes are left to it, and {why}"
        package = provider("key", key)
        yield facts.config.problem(key, why, registry.remedy(package) if package else "switch its plugin on")


def check_reduced(facts: JobFacts, active: list[Transform]) -> Iterator[Problem]:
    """Whether gradients are summed over every mesh dimension whose ranks see different tokens."""
    reduced = {name for transform in active for name in transform.reduces}
    for dim in facts.mesh.dims:
        served = any(dim.degree_key in transform.serves for transform in active)
        if not (dim.sees_other_data and served and facts.mesh.degrees[dim.name] > 1):
            continue
        if dim.name not in reduced and (dim.data_parallel == "own" or DATA_DIMS not in reduced):
            why = f"mesh dimension {dim.name!r} divides the {dim.divides} over {facts.mesh.degrees[dim.name]} ranks, and no "
            why += "transform in use sums gradients over it, so that their weights would diverge"
            fix = f"set it to 1; the plugin's transform that sums gradients over it should declare reduces = ({dim.name!r},)"
            yield facts.config.problem(dim.degree_key, why, fix)
