"""What plugins register: small frozen descriptions with lazy references to the code that builds the thing.

A component names itself, says in a line what it is, which config section it reads, and where its code is. Nothing here
imports torch, and neither may a ``plugin.py``; the code behind a :class:`~titan_core.api.ref.Ref` may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from importlib import resources
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel

from titan_core.api.build_context import JobContext, TrainingContext
from titan_core.api.config import Config
from titan_core.api.job_facts import JobFacts
from titan_core.api.mesh import MeshDim, MeshView
from titan_core.api.ref import Ref
from titan_core.api.section import Section

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    import torch
    from torch import nn
    from torch.optim import Optimizer as TorchOptimizer
    from torch.optim.lr_scheduler import LRScheduler

    from titan_core.api.dataset import DatasetContext, DocumentSource
    from titan_core.api.errors import Problem
    from titan_core.api.job_mesh import JobMesh
    from titan_core.api.layout import ModelDefinition
    from titan_core.api.model_part import ModelPart
    from titan_core.api.model_trial import ModelTrial
    from titan_core.api.objective import ObjectiveFunction
    from titan_core.api.optimizer import LRScheduleContext, OptimizerContext, ParamGroup
    from titan_core.api.step import StepRunner
    from titan_core.api.tokenizer import TextTokenizer, TokenizerContext
    from titan_core.api.weights import WeightFormat


class Phase(IntEnum):
    """The phases, in the order of their application. Why this order:

    a pipeline cut decides which modules a rank has at all; precision swaps linear layers, so that everything later wraps
    the swapped ones; tensor parallelism shards them, and expert parallelism what tensor parallelism left of the experts;
    context parallelism works on what is left of the heads;
    recomputation must see the final operators, and the compiler must see recomputation; data parallelism goes last,
    because it hooks the boundaries of whole compiled blocks.
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
"""In :attr:`Transform.reduces`: every dimension that data parallelism is to shard or replicate parameters over."""


@dataclass(frozen=True, kw_only=True)
class Component:
    """What all components have."""

    kind: ClassVar[str]
    """The stage's name for a reader: 'model', 'parallelism', ..."""

    name: str
    """How a config selects it; unique among the components of its kind."""
    summary: str
    """One line for ``titan plugins``."""
    config: type[Section] | None = None
    """The class of its own config section. Components of one plugin may share a section."""

    def section_in(self, config: Config) -> Any:
        """Its own section in ``config``; ``None`` if it has none."""
        return None if self.config is None else config.section(self.config)

    def context(self, facts: JobFacts) -> JobContext[Any]:
        """What its code is called with while a job is assembled."""
        return JobContext(section=self.section_in(facts.config), facts=facts)

    def training_context(self, facts: JobFacts, mesh: JobMesh, device: torch.device) -> TrainingContext[Any]:
        """What its code is called with once training starts."""
        return TrainingContext(section=self.section_in(facts.config), facts=facts, mesh=mesh, device=device)


@dataclass(frozen=True, kw_only=True)
class Model(Component):
    """A model family."""

    kind = "model"
    flavors: Mapping[str, BaseModel]
    """Flavor name -> the arguments of that size, all of one pydantic class; ``[model.args]`` overrides single fields."""
    define: Ref[Callable[[Any], ModelDefinition]]
    """Arguments -> definition. Must not import torch."""
    formats: tuple[WeightFormat, ...] = ()
    """Other formats that its weights may come from and go to."""


@dataclass(frozen=True, kw_only=True)
class Transform(Component):
    """Something that is done to a model before it trains: a parallelism, a precision, recomputation, compilation."""

    kind = "transform"
    phase: Phase
    apply: Ref[Callable[[ModelPart, TrainingContext[Any]], ModelPart | Sequence[ModelPart]]]
    """Part of a model -> that part, transformed. In phase PIPELINE it may return several parts (or fewer modules). In
    phase DATA it must leave each gradient as the *sum* over the ranks that hold different tokens: the loss is already
    divided by the target tokens of the global batch."""
    active: Callable[[JobContext[Any]], bool]
    """Whether the job uses it. Pure, free of torch."""
    serves: tuple[str, ...] = ()
    """Core config keys (``"parallelism.data_parallel_shard_degree"``) that this transform makes real. A key set away
    from its default that no active transform serves is an error."""
    mesh_dims: tuple[MeshDim, ...] = ()
    """Mesh dimensions of its own, beyond the standard ones."""
    mesh_views: tuple[MeshView, ...] = ()
    """Views of its own: other ways to fold dimensions of the mesh."""
    reduces: tuple[str, ...] = ()
    """Names of the mesh dimensions over which it sums gradients; :data:`DATA_DIMS` stands for all whose ``data_parallel`` is
    not ``own``. A dimension that divides the batch or the sequence, without ``copies``, needs an active transform that sums
    gradients over it: without one, its ranks' weights would diverge."""
    check: Ref[Callable[[JobContext[Any]], Iterable[Problem]]] | None = None
    """What makes the job impossible, found before anything is built. Free of torch; called when active."""
    check_model: Ref[Callable[[nn.Module, ModelTrial, TrainingContext[Any]], Iterable[Problem]]] | None = None
    """(model, trial, context) -> what in the model makes it impossible. Called when active, with the whole model on the meta
    device before any transform, and with a :class:`~titan_core.api.model_trial.ModelTrial`: a small copy of it that runs."""
    hardware: Ref[Callable[[JobContext[Any]], Iterable[Problem]]] | None = None
    """What this machine lacks for it. Called when a job starts, not when a config is only looked at; may import torch."""
    step: Ref[Callable[[StepRunner, Sequence[ModelPart], TrainingContext[Any]], StepRunner]] | None = None
    """How a step runs forward and backward, where the transform changes that (pipeline schedules): it is given the runner of
    the transforms before it, and returns one that calls it or takes its place. A pipeline takes its place, so a transform
    of a later phase wraps the pipeline's."""
    observe: Ref[Callable[[Sequence[ModelPart], TrainingContext[Any]], object]] | None = None
    """Makes an object with lifecycle hooks, for what must be done around steps (an exchange of weights every so often)."""


@dataclass(frozen=True, kw_only=True)
class Debugger(Component):
    """An observer of a run: an object with lifecycle hooks, made when the job asks for it."""

    kind = "debug"
    build: Ref[Callable[[JobContext[Any]], object]]
    active: Callable[[JobContext[Any]], bool]
    check: Ref[Callable[[JobContext[Any]], Iterable[Problem]]] | None = None
    """What makes the job impossible, found before anything is built. Free of torch; called when active."""


@dataclass(frozen=True, kw_only=True)
class Dataset(Component):
    """A source of documents, selected by ``training.dataset``."""

    kind = "dataset"
    build: Ref[Callable[[DatasetContext[Any]], DocumentSource]]
    """Opens it. Free of torch."""
    check: Ref[Callable[[DatasetContext[Any]], Iterable[Problem]]] | None = None
    """Cheap look at whether it can be opened (file there, not empty, field present). Free of torch."""
    splits: bool = False
    """Whether it reads the split that its context names; a job that names one for another dataset is refused."""
    holds_tokens: bool = False
    """Whether its documents are token ids, which mean something with one tokenizer alone: its context then has the
    fingerprint and the vocabulary's size of the job's."""


@dataclass(frozen=True, kw_only=True)
class Tokenizer(Component):
    """Text to token ids, selected by ``model.tokenizer``."""

    kind = "tokenizer"
    build: Ref[Callable[[TokenizerContext[Any]], TextTokenizer]]
    """Free of torch."""


@dataclass(frozen=True, kw_only=True)
class Optimizer(Component):
    """An optimizer, selected by ``optimizer.name``."""

    kind = "optimizer"
    build: Ref[Callable[[OptimizerContext[Any]], TorchOptimizer]]

    def optimizer_context(
        self, facts: JobFacts, mesh: JobMesh, device: torch.device, groups: Sequence[ParamGroup]
    ) -> OptimizerContext[Any]:
        """What it is built with."""
        from titan_core.api.optimizer import OptimizerContext  # with torch

        section = self.section_in(facts.config)
        return OptimizerContext(section=section, facts=facts, mesh=mesh, device=device, groups=groups)


@dataclass(frozen=True, kw_only=True)
class Objective(Component):
    """What training minimises, selected by ``objective.name``."""

    kind = "objective"
    build: Ref[Callable[[TrainingContext[Any]], ObjectiveFunction]]
    check: Ref[Callable[[JobContext[Any]], Iterable[Problem]]] | None = None
    """What makes the job impossible, found before anything is built. Free of torch."""


@dataclass(frozen=True, kw_only=True)
class LRSchedule(Component):
    """A learning rate schedule, selected by ``lr_scheduler.name``."""

    kind = "lr schedule"
    build: Ref[Callable[[LRScheduleContext[Any]], LRScheduler]]


@dataclass(frozen=True, kw_only=True)
class Recipe(Component):
    """A complete config that ships with a plugin."""

    kind = "recipe"
    package: str
    path: str
    default: bool = False
    """Whether commands take it where none is named. Two installed plugins with a default have the user choose."""

    @property
    def file(self) -> Traversable:
        """The TOML file."""
        return resources.files(self.package).joinpath(self.path)


def recipes_in(package: str, folder: str = "recipes") -> list[Recipe]:
    """Every ``*.toml`` in ``folder`` of ``package`` as a recipe; the file's first comment line is its summary."""
    recipes = []
    for file in sorted(resources.files(package).joinpath(folder).iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            first_line = file.read_text(encoding="utf-8").partition("\n")[0]
            name = file.name.removesuffix(".toml")
            recipes.append(Recipe(name=name, summary=first_line.lstrip("# "), package=package, path=f"{folder}/{file.name}"))
    return recipes
