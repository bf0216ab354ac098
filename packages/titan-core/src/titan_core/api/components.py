"""Components, which plugins register: small frozen descriptions with lazy references to the code that builds the thing.

A component has a name, a one-line summary, optionally a config section, and references to its code. Neither this module nor
a ``plugin.py`` may import torch; the code behind a :class:`~titan_core.api.ref.Ref` may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from importlib import resources
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel

from titan_core.api.build_context import JobContext, TrainingContext
from titan_core.api.config import Config
from titan_core.api.dataset import DatasetContext, DocumentSource
from titan_core.api.errors import Problem
from titan_core.api.job_facts import JobFacts
from titan_core.api.mesh import MeshDim, MeshView
from titan_core.api.ref import Ref
from titan_core.api.section import Section
from titan_core.api.tokenizer import TextTokenizer, TokenizerContext
from titan_core.api.weights import WeightFormat

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer as TorchOptimizer
    from torch.optim.lr_scheduler import LRScheduler

    from titan_core.api.job_mesh import JobMesh
    from titan_core.api.layout import ModelDefinition
    from titan_core.api.model_part import ModelPart
    from titan_core.api.model_trial import ModelTrial
    from titan_core.api.objective import ObjectiveFunction
    from titan_core.api.optimizer import LRScheduleContext, OptimizerContext, ParamGroup
    from titan_core.api.planning import Costs
    from titan_core.api.step import StepRunner


class Phase(IntEnum):
    """The phases in which transforms are applied, in this order:

    1. A pipeline split determines which modules a rank has.
    2. Precision replaces linear layers, so that all later phases wrap the replacements.
    3. Tensor parallelism shards layers and experts. Expert parallelism then distributes the experts, or their shards, and
       context parallelism works with the heads that tensor parallelism leaves on a rank.
    4. Activation checkpointing must see the final operators, and the compiler must see activation checkpointing.
    5. Data parallelism comes last, because it hooks the boundaries of whole compiled blocks.
    """

    PIPELINE = 1
    PRECISION = 2
    TENSOR = 3
    EXPERT = 4
    CONTEXT = 5
    RECOMPUTE = 6
    COMPILE = 7
    DATA = 8


DATA_DIMS = "*"
"""In :attr:`Transform.reduces`: every dimension over which data parallelism shards or replicates parameters."""


@dataclass(frozen=True, kw_only=True)
class Component:
    """The fields that all components share."""

    kind: ClassVar[str]
    """The name of the kind for readers: 'model', 'dataset', ..."""
    keys: ClassVar[tuple[str, ...]] = ()
    """The config keys that select a component of this kind by its name."""

    name: str
    """The name that selects the component in a config; unique among the components of its kind."""
    summary: str
    """One line for ``titan plugins``."""
    config: type[Section] | None = None
    """The class of the component's config section. Components of one plugin may share a section."""

    def section_in(self, config: Config) -> Any:
        """Return the component's section in ``config``, or ``None`` if the component has none."""
        return None if self.config is None else config.section(self.config)

    def context(self, facts: JobFacts) -> JobContext[Any]:
        """Return the context with which the component's code is called while a job is assembled."""
        return JobContext(section=self.section_in(facts.config), facts=facts)

    def training_context(self, facts: JobFacts, mesh: JobMesh, device: torch.device) -> TrainingContext[Any]:
        """Return the context with which the component's code is called once training starts."""
        return TrainingContext(section=self.section_in(facts.config), facts=facts, mesh=mesh, device=device)


@dataclass(frozen=True, kw_only=True)
class Model(Component):
    """A model family."""

    kind = "model"
    keys = ("model.name",)
    flavors: Mapping[str, BaseModel]
    """Flavor name -> model arguments. All flavors share one pydantic class; ``[model.args]`` overrides single fields."""
    define: Ref[Callable[[Any], ModelDefinition]]
    """Model arguments -> definition. Must not import torch."""
    formats: tuple[WeightFormat, ...] = ()
    """Other formats from which the weights can be read, or to which they can be written."""


@dataclass(frozen=True, kw_only=True)
class Transform(Component):
    """A change to the model before training: a parallelism, a precision, activation checkpointing or compilation."""

    kind = "transform"
    phase: Phase
    apply: Ref[Callable[[ModelPart, TrainingContext[Any]], ModelPart | Sequence[ModelPart]]]
    """Model part -> transformed model part. In phase PIPELINE it may return several parts, or a part with fewer modules. In
    phase DATA it must *sum* each gradient over the ranks that hold different tokens: the loss is already divided by the
    number of target tokens in the global batch."""
    active: Callable[[JobContext[Any]], bool]
    """Whether the job uses the transform. Must be pure and must not import torch."""
    serves: tuple[str, ...] = ()
    """Core config keys that this transform implements (``"parallelism.data_parallel_shard_degree"``). A non-default
    value of a key that no active transform serves is an error."""
    mesh_dims: tuple[MeshDim, ...] = ()
    """Mesh dimensions that the transform adds to the standard ones."""
    mesh_views: tuple[MeshView, ...] = ()
    """Mesh views that the transform adds: other ways to fold dimensions of the mesh."""
    reduces: tuple[str, ...] = ()
    """Names of the mesh dimensions over which the transform sums gradients. :data:`DATA_DIMS` means all dimensions whose
    ``data_parallel`` is not ``own``. A dimension that divides the batch or the sequence and does not set ``diverges`` needs
    an active transform that sums gradients over it; otherwise the weights of its ranks would diverge."""
    check: Ref[Callable[[JobContext[Any]], Iterable[Problem]]] | None = None
    """Returns the reasons why the job cannot run, before anything is built. Called if active; must not import torch."""
    check_model: Ref[Callable[[nn.Module, ModelTrial, TrainingContext[Any]], Iterable[Problem]]] | None = None
    """(model, trial, context) -> the reasons why the transform cannot handle this model. Called if active, before any
    transform is applied, with the whole model on the meta device and a :class:`~titan_core.api.model_trial.ModelTrial`,
    which runs a small copy of the model."""
    hardware: Ref[Callable[[JobContext[Any]], Iterable[Problem]]] | None = None
    """Returns the reasons why this machine cannot run the transform. Called when a job starts, but not when a config is only
    checked; may import torch."""
    step: Ref[Callable[[StepRunner, Sequence[ModelPart], TrainingContext[Any]], StepRunner]] | None = None
    """Replaces how a step runs forward and backward (pipeline schedules). It receives the runner of the preceding transforms
    and returns a runner that either calls it or replaces it. A pipeline replaces it, so a transform of a later phase wraps
    the pipeline's runner."""
    observe: Ref[Callable[[Sequence[ModelPart], TrainingContext[Any]], object]] | None = None
    """Builds an object with lifecycle hooks for work between steps, such as a periodic exchange of weights."""
    choices: Ref[Callable[[JobContext[Any]], Mapping[str, Sequence[Any]]]] | None = None
    """Config keys besides degrees, and the values that are worth trying in a job with this mesh and batch, best first. The
    config has the values that transforms of later phases try. Called even if the transform is inactive; must not import
    torch. See :mod:`titan_core.api.planning`."""
    costs: Ref[Callable[[JobContext[Any]], Costs]] | None = None
    """Returns what the transform changes about the memory and the time of a step. Called if active; must not import torch.
    A transform without it, apart from its mesh dimensions and views, changes neither."""


@dataclass(frozen=True, kw_only=True)
class Debugger(Component):
    """An observer of a run: an object with lifecycle hooks, built if the job selects it."""

    kind = "debug"
    build: Ref[Callable[[JobContext[Any]], object]]
    active: Callable[[JobContext[Any]], bool]
    check: Ref[Callable[[JobContext[Any]], Iterable[Problem]]] | None = None
    """Returns the reasons why the job cannot run, before anything is built. Called if active; must not import torch."""


@dataclass(frozen=True, kw_only=True)
class Dataset(Component):
    """A source of documents, selected by ``training.dataset``."""

    kind = "dataset"
    keys = ("training.dataset", "validation.dataset")
    build: Ref[Callable[[DatasetContext[Any]], DocumentSource]]
    """Opens the dataset. Must not import torch."""
    check: Ref[Callable[[DatasetContext[Any]], Iterable[Problem]]] | None = None
    """Returns the reasons why the dataset cannot be opened (missing file or field, empty file). Cheap; free of torch."""
    splits: bool = False
    """Whether the dataset honours the split in its context. A job that sets a split for any other dataset is refused."""
    holds_tokens: bool = False
    """Whether the documents are token ids, which are meaningful with one tokenizer only. If so, the context holds the
    fingerprint and vocabulary size of the job's tokenizer."""
    tokenizes: bool = False
    """Whether the dataset tokenises its documents, which decides the weight of each token. If so, the context holds the
    job's tokenizer and the length of its sequences, and ``data.document_mask`` must be on: several documents share a
    sequence."""


@dataclass(frozen=True, kw_only=True)
class RecordFormat(Component):
    """A conversion of records of a dataset, selected by ``data.format``."""

    kind = "format"
    keys = ("data.format", "validation.format")
    convert: Ref[Callable[[Mapping[str, Any]], Any]]
    """Record -> its text; for dataset ``chat``, a record with a chat. An exception makes the record corrupt
    (``data.on_corrupt``). Must not import torch."""


@dataclass(frozen=True, kw_only=True)
class Tokenizer(Component):
    """A conversion of text to token ids, selected by ``model.tokenizer``."""

    kind = "tokenizer"
    keys = ("model.tokenizer",)
    build: Ref[Callable[[TokenizerContext[Any]], TextTokenizer]]
    """Builds the tokenizer. Must not import torch."""


@dataclass(frozen=True, kw_only=True)
class ModelHub(Component):
    """A place where models with trained weights have names, such as ``organisation/model``."""

    kind = "model hub"
    locate: Ref[Callable[[str], str]]
    """Name -> local folder with the model's files. Raises :class:`~titan_core.api.errors.UserError` if this machine does not
    have them. Must not import torch."""


@dataclass(frozen=True, kw_only=True)
class Optimizer(Component):
    """An optimizer, selected by ``optimizer.name``."""

    kind = "optimizer"
    keys = ("optimizer.name",)
    build: Ref[Callable[[OptimizerContext[Any]], TorchOptimizer]]

    def optimizer_context(
        self, facts: JobFacts, mesh: JobMesh, device: torch.device, groups: Sequence[ParamGroup]
    ) -> OptimizerContext[Any]:
        """Return the context with which the optimizer is built."""
        from titan_core.api.optimizer import OptimizerContext  # imports torch

        section = self.section_in(facts.config)
        return OptimizerContext(section=section, facts=facts, mesh=mesh, device=device, groups=groups)


@dataclass(frozen=True, kw_only=True)
class Objective(Component):
    """The loss that training minimises, selected by ``objective.name``."""

    kind = "objective"
    keys = ("objective.name",)
    build: Ref[Callable[[TrainingContext[Any]], ObjectiveFunction]]
    check: Ref[Callable[[JobContext[Any]], Iterable[Problem]]] | None = None
    """Returns the reasons why the job cannot run, before anything is built. Must not import torch."""


@dataclass(frozen=True, kw_only=True)
class LRSchedule(Component):
    """A learning-rate schedule, selected by ``lr_scheduler.name``."""

    kind = "lr schedule"
    keys = ("lr_scheduler.name",)
    build: Ref[Callable[[LRScheduleContext[Any]], LRScheduler]]


@dataclass(frozen=True, kw_only=True)
class Recipe(Component):
    """A complete config that ships with a plugin."""

    kind = "recipe"
    package: str
    path: str
    default: bool = False
    """Whether commands use this recipe if none is named. If two installed plugins have a default, the user must choose."""

    @property
    def file(self) -> Traversable:
        """The TOML file."""
        return resources.files(self.package).joinpath(self.path)


def recipes_in(package: str, folder: str = "recipes") -> list[Recipe]:
    """Return every ``*.toml`` in ``folder`` of ``package`` as a recipe. The file's first comment line is its summary."""
    recipes = []
    for file in sorted(resources.files(package).joinpath(folder).iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            first_line = file.read_text(encoding="utf-8").partition("\n")[0]
            name = file.name.removesuffix(".toml")
            recipes.append(Recipe(name=name, summary=first_line.lstrip("# "), package=package, path=f"{folder}/{file.name}"))
    return recipes
