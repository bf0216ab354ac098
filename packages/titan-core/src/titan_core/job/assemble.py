"""Assembly: picks components by name and checks them against each other. Pure, and free of torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from titan_core.api import (
    Checkpoint,
    Component,
    Config,
    Job,
    LRSchedule,
    MeshDim,
    MeshPlan,
    MeshView,
    Model,
    ModelDefinition,
    Objective,
    Observer,
    Optimizer,
    Problem,
    TextTokenizer,
    Tokenizer,
    Transform,
    UserError,
)
from titan_core.api.config.sections import DataSection, ModelSection, ValidationSection
from titan_core.api.parallel.mesh import STANDARD_DIMS
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.api.plugins.errors import shown
from titan_core.config.overrides import value_of
from titan_core.config.pretrained import NONE
from titan_core.config.problems import problems_of
from titan_core.config.stages import merged
from titan_core.job.batch_plan import plan_batch
from titan_core.job.checks import (
    MissingTokenizer,
    check_document_mask,
    check_param_groups,
    check_pretrained,
    check_reduced,
    check_served,
    check_sizes,
    pretrained_notes,
    unused_keys,
)
from titan_core.job.data_plan import (
    MIXTURE,
    SETS,
    check_extras,
    pick_datasets,
    pick_validation,
    plan_stream,
    tokenizer_context,
)
from titan_core.job.mesh_plan import plan_mesh
from titan_core.job.reference_model import reference_config, require_reference
from titan_core.plugins.registry import Components
from titan_core.toolkit.errors import PluginFailure, nearest, note_of
from titan_core.toolkit.fields import model_at

C = TypeVar("C", bound=Component)
R = TypeVar("R")


def assemble(
    config: Config,
    registry: Components,
    world_size: int | None = None,
    trains: bool = True,
    missing_ok: bool = False,
) -> AssembledJob:
    """Return the job that ``config`` describes.

    Args:
        world_size: number of ranks; ``None`` for the smallest world that the config allows.
        trains: see :class:`~titan_core.api.Job`.
        missing_ok: list files that this machine lacks in :attr:`~titan_core.api.plugins.assembled_job.AssembledJob.missing`.

    Raises:
        UserError: the job is invalid. Lists every problem found.
    """
    problems: list[Problem] = []
    missing: list[Problem] = []

    def attempt(make: Callable[..., R], *arguments: object) -> R | None:
        """Collect problems instead of stopping at the first."""
        try:
            return make(*arguments)
        except UserError as error:
            if missing_ok and all(problem.missing for problem in error.problems):
                missing.extend(error.problems)
            else:
                problems.extend(error.problems)
            return None

    model = attempt(_pick, config, registry, Model)
    args = attempt(model_args, config, model) if model is not None else None
    definition = attempt(define_model, model, args) if model is not None and args is not None else None
    tokenizer = attempt(_pick, config, registry, Tokenizer)
    text_tokenizer = attempt(_build_tokenizer, config, tokenizer) if tokenizer is not None else None
    absent, without_tokenizer = missing if missing_ok else None, tuple(missing)
    datasets = attempt(pick_datasets, config, registry, text_tokenizer, absent)
    validation = attempt(pick_validation, config, registry, text_tokenizer, absent)
    objective = attempt(_pick, config, registry, Objective)
    optimizer = attempt(_pick, config, registry, Optimizer)
    lr_schedule = attempt(_pick, config, registry, LRSchedule)
    mesh = attempt(mesh_of, config, registry, world_size)
    batch = attempt(plan_batch, config, mesh.batch_degree) if mesh is not None else None
    stored = config.pretrained
    if stored is not None and args is not None and model is not None:
        problems += check_pretrained(config, stored, args, model)
    if definition is not None:
        problems += check_sizes(config, definition, text_tokenizer)
        problems += check_document_mask(config, definition)
    problems += check_param_groups(config)
    if mesh is None or batch is None or definition is None:
        raise UserError(*problems)

    job = Job(config, mesh, batch, definition, trains)
    active = [transform for transform in registry.all(Transform) if _is_active(transform, job, registry)]
    problems += check_served(job, active, registry)
    problems += check_reduced(job, active, registry)
    if trains and datasets is not None:
        streams = {"training.dataset" if config.section(DataSection).mixture is None else MIXTURE: datasets}
        key = "validation.dataset" if config.section(ValidationSection).sets is None else SETS
        streams |= {key: validation} if validation else {}
        problems += check_extras(config, streams, definition, objective, active)
    observers = [observer for observer in registry.all(Observer) if _is_active(observer, job, registry)]
    checkpoints = [one for one in registry.all(Checkpoint) if one.active is not None and _is_active(one, job, registry)]
    chosen = [one for one in (objective, lr_schedule) if one is not None]
    checked: list[Transform | Observer | Objective | LRSchedule | Checkpoint]
    checked = [*active, *observers, *chosen, *checkpoints]
    for component in checked:
        problems += registry.claims(component.kind, component.name)
        if component.check is not None:
            problems += component.check.call_list(Problem, component.context(job))
    if len(checkpoints) > 1:
        names = ", ".join(checkpoint.name for checkpoint in checkpoints)
        problems.append(
            Problem(f"checkpoints {names}", "a job can use only one checkpoint format", "switch off all but one")
        )
    if problems:
        raise UserError(*problems)
    if text_tokenizer is None:
        text_tokenizer = MissingTokenizer(definition.layout.vocab_size, without_tokenizer)
    assert model and args and datasets and tokenizer and objective and optimizer and lr_schedule
    stream = plan_stream(config, tokenizer, batch, datasets)
    passed = sum(len(stream.excluded.get(dataset.name, ())) for dataset in datasets)
    assembled = AssembledJob(
        **vars(job),
        registry=registry,
        family=model,
        model_args=args,
        transforms=tuple(sorted(active, key=lambda transform: (transform.phase, transform.name))),
        data=stream,
        validation=replace(stream, datasets=validation, on_end="once", excluded={}) if validation else None,
        tokenizer=tokenizer,
        text_tokenizer=text_tokenizer,
        objective=objective,
        optimizer=optimizer,
        lr_schedule=lr_schedule,
        checkpoint=checkpoints[0] if checkpoints else None,
        observers=tuple(observers),
        notes=(
            *config.notes,
            *unused_keys(config, registry, lr_schedule),
            *([f"{passed:,} documents are passed over (data.exclude)"] if passed else []),
            *(pretrained_notes(stored, definition, text_tokenizer) if stored is not None else ()),
            *map(note_of, missing),
        ),
        missing=tuple(missing),
    )
    return assembled if objective.reference is None or not trains else _with_reference(assembled, objective, registry)


def _with_reference(job: AssembledJob, objective: Objective, registry: Components) -> AssembledJob:
    """Return ``job`` with the reference model that its objective compares with.

    Raises:
        UserError: there is no such model, or the job cannot divide it.
    """
    assert objective.reference is not None
    keys: Mapping[str, Any] = objective.reference.call(Mapping, objective.context(job))
    if not all(isinstance(key, str) and key.startswith("model.") for key in keys):
        raise objective.reference.wrong(f"returned {shown(keys)}; its keys must be those of [model]")
    config = reference_config(job.config, keys, registry)
    family, args = pick_model(config, registry)
    reference = replace(job, config=config, family=family, model_args=args, model=define_model(family, args))
    note = f"objective {objective.name!r} compares with a reference model ({reference.name}), which each step computes too"
    return replace(require_reference(job, reference), notes=(*job.notes, note))


def _pick(config: Config, registry: Components, kind: type[C]) -> C:
    key = kind.keys[0]
    name = config.value(key)
    if name not in registry.names(kind):
        why = registry.unknown(kind) if name else f"no {kind.kind} is selected, and none or several are installed"
        raise UserError(config.problem(key, why, registry.suggest(kind, name)))
    return registry.get(kind, name)


def pick_model(config: Config, registry: Components) -> tuple[Model, BaseModel]:
    """Return the model that ``config`` describes, and its arguments.

    Raises:
        UserError: the model is not installed, or rejects its flavor or arguments.
    """
    model = _pick(config, registry, Model)
    return model, model_args(config, model)


def mesh_of(config: Config, registry: Components, world_size: int | None) -> MeshPlan:
    """Return the mesh of the job that ``config`` describes.

    Raises:
        UserError: the degrees do not fit each other or ``world_size``.
    """
    transforms = registry.all(Transform)
    dims = [dim for transform in transforms for dim in transform.mesh.dims]
    views = [view for transform in transforms for view in transform.mesh.views]
    known: set[MeshDim | MeshView] = {*STANDARD_DIMS, *dims, *views}
    claims = Counter(one.name for one in known)
    used = {one.name for one in known if config.value(one.degree_key) != 1}

    def concerns(one: MeshDim | MeshView) -> bool:
        """Whether to plan with a dimension or view: a name that two plugins claim concerns only the jobs that use it."""
        return claims[one.name] == 1 or one.name in used

    return plan_mesh(config, filter(concerns, dims), world_size, filter(concerns, views))


def define_model(model: Model, args: BaseModel) -> ModelDefinition:
    """Return the definition of ``model`` with ``args``.

    Raises:
        UserError: its code cannot be imported, or rejects the arguments.
    """
    found: ModelDefinition = model.define.call(ModelDefinition, args)
    flops = found.flops_per_token(found.layout.max_seq_len)
    if not 0 <= flops < math.inf:
        raise model.define.wrong(f"returned flops_per_token of {flops}; they must be finite, and at least 0")
    return found


def _is_active(component: Transform | Observer | Checkpoint, job: Job, registry: Components) -> bool:
    """Return whether the job uses the component. ``None``, of a forgotten ``return``, would silently switch it off.

    Raises:
        UserError: it does not say.
    """
    assert component.active is not None
    active = component.active(component.context(job))
    if not isinstance(active, bool):
        raise registry.origin(component).failure(f"active returned {shown(active)}; it must return True or False")
    return active


def model_args(config: Config, model: Model) -> BaseModel:
    """Return the arguments of the model's flavor with ``[model.args]`` applied.

    Raises:
        UserError: the flavor does not exist, or the model rejects the arguments.
    """
    section = config.section(ModelSection)
    if section.flavor not in ("", *model.flavors):
        why = f"model {model.name!r} has no such flavor"
        raise UserError(config.problem("model.flavor", why, nearest(section.flavor, list(model.flavors))))
    cls = type(next(iter(model.flavors.values())))
    of_flavor = model.flavors[section.flavor].model_dump() if section.flavor else {}
    try:
        args: BaseModel = cls.model_validate(merged(of_flavor, _with_none(cls, section.args)), strict=True)
    except ValidationError as error:
        raise UserError(*problems_of(error, "model.args", cls, section.args, config.where)) from None
    return args


def _with_none(cls: type[BaseModel] | None, args: dict[str, Any]) -> dict[str, Any]:
    """Return ``args`` with ``None`` for each "none" whose field in ``cls`` allows it."""
    found: dict[str, Any] = {}
    for key, value in args.items():
        if isinstance(value, dict):
            found[key] = _with_none(model_at(cls, [key]) if cls is not None else None, value)
        else:
            found[key] = value_of(value, cls, key) if value == NONE and cls is not None else value
    return found


def _build_tokenizer(config: Config, tokenizer: Tokenizer) -> TextTokenizer:
    path = config.section(ModelSection).tokenizer_path
    try:
        found: TextTokenizer = tokenizer.build.call(TextTokenizer, tokenizer_context(config, tokenizer))
        if not isinstance(found.vocab_size, int) or found.vocab_size < 1:
            raise tokenizer.build.wrong(f"returned a tokenizer of {shown(found.vocab_size)} tokens; it needs 1 or more")
        return found
    except PluginFailure:
        raise
    except UserError as error:
        where = config.where("model.tokenizer_path", path) if path else config.where("model.tokenizer", tokenizer.name)
        raise UserError(*(replace(problem, where=where) for problem in error.problems)) from error
