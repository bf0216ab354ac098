"""Transforms: the changes of a model before training, and the phases in which they apply."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from titan_core.api.parallel.mesh import MeshDim, MeshView
from titan_core.api.plugins.component import Component
from titan_core.api.plugins.errors import Problem
from titan_core.api.plugins.job import JobContext, TrainingContext
from titan_core.api.plugins.ref import Ref

if TYPE_CHECKING:
    from torch import nn

    from titan_core.api.parallel.model_part import ModelPart
    from titan_core.api.parallel.model_trial import ModelTrial
    from titan_core.api.parallel.planning import Costs
    from titan_core.api.parallel.step import StepRunner


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
    """Splits the model into stages."""
    PRECISION = 2
    """Replaces linear layers by ones that compute in another format."""
    TENSOR = 3
    """Shards the features of layers."""
    EXPERT = 4
    """Distributes experts."""
    CONTEXT = 5
    """Shards the positions of sequences: replaces mixers."""
    RECOMPUTE = 6
    """Activation checkpointing."""
    COMPILE = 7
    """Compiles blocks."""
    DATA = 8
    """Shards or replicates parameters over ranks with different data, and sums gradients."""


DATA_DIMS = "*"
"""In :attr:`MeshUse.sums`: every dimension over which data parallelism shards or replicates parameters."""


@dataclass(frozen=True, kw_only=True)
class MeshUse:
    """What a transform needs of the mesh."""

    dims: tuple[MeshDim, ...] = ()
    """Dimensions that the transform adds to the standard ones."""
    views: tuple[MeshView, ...] = ()
    """Views that the transform adds: other ways to fold dimensions of the mesh."""
    sums: tuple[str, ...] = ()
    """Names of the dimensions over which the transform sums gradients. :data:`DATA_DIMS` means all dimensions whose
    ``data_parallel`` is not ``own``. A dimension that divides the batch or the sequence and does not set ``diverges`` needs
    an active transform that sums gradients over it; otherwise the weights of its ranks would diverge."""
    tolerance: float = 0.0
    """Error that a lossy exchange, such as a sum of 8-bit numbers, adds to a gradient: the largest norm of the difference
    from the gradient of one device, relative to the norm of that. The trial before the first step and ``titan verify``
    accept it, and say so. All ranks must still get the same gradient."""


@dataclass(frozen=True, kw_only=True)
class Checks:
    """What a transform checks later than :attr:`Component.check`."""

    model: Ref[Callable[[nn.Module, ModelTrial, TrainingContext[Any]], Iterable[Problem]]] | None = None
    """(model, trial, context) -> the reasons why the transform cannot handle this model. Called if active, before any
    transform is applied, with the whole model on the meta device and a :class:`~titan_core.api.ModelTrial`, which runs a
    small copy of the model."""
    hardware: Ref[Callable[[JobContext[Any]], Iterable[Problem]]] | None = None
    """Returns the reasons why this machine cannot run the transform. Called when a job starts, but not when a config is only
    checked; may import torch."""


@dataclass(frozen=True, kw_only=True)
class StepUse:
    """What a transform does in a step, or between steps."""

    runner: Ref[Callable[[StepRunner, Sequence[ModelPart], TrainingContext[Any]], StepRunner]] | None = None
    """Replaces how a step runs forward and backward (pipeline schedules). It receives the runner of the preceding transforms
    and returns a runner that either calls it or replaces it. A pipeline replaces it, so a transform of a later phase wraps
    the pipeline's runner."""
    observer: Ref[Callable[[Sequence[ModelPart], TrainingContext[Any]], object]] | None = None
    """Builds an object with lifecycle hooks for work between steps, such as a periodic exchange of weights."""


@dataclass(frozen=True, kw_only=True)
class Planning:
    """What ``titan plan`` and ``titan estimate`` may know of a transform; see :mod:`titan_core.api.parallel.planning`."""

    choices: Ref[Callable[[JobContext[Any]], Mapping[str, Sequence[Any]]]] | None = None
    """Config keys besides degrees, and the values that are worth trying in a job with this mesh and batch, best first. The
    config has the values that transforms of later phases try. Called even if the transform is inactive; must not import
    torch."""
    faster_first: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Config key of ``choices`` -> values of which each later one makes a block take no less time than the one before,
    whatever else a job chooses, because it only adds work: ``{"activation_checkpoint.mode": ("none", "full")}``. A plan
    that knows the time of one then excludes later ones without tracing them."""
    costs: Ref[Callable[[JobContext[Any]], Costs]] | None = None
    """Returns what the transform changes about the memory and the time of a step. Called if active; must not import torch.
    A transform without it, apart from its mesh dimensions and views, changes neither."""


@dataclass(frozen=True, kw_only=True)
class Transform(Component):
    """A change to the model before training: a parallelism, a precision, activation checkpointing or compilation."""

    kind = "transform"
    phase: Phase
    """Its position among the transforms of a job."""
    active: Callable[[JobContext[Any]], bool]
    """Whether the job uses the transform. Must be pure and must not import torch."""
    apply: Ref[Callable[[ModelPart, TrainingContext[Any]], ModelPart | Sequence[ModelPart]]] | None = None
    """Model part -> transformed model part. In phase PIPELINE it may return several parts, or a part with fewer modules. In
    phase DATA it must *sum* each gradient over the ranks that hold different tokens: the loss is already divided by the
    number of target tokens in the global batch. Without it, the part stays as it is."""
    serves: tuple[str, ...] = ()
    """Config keys of the core that this transform implements (``"training.mixed_precision_param"``), beside the degrees of
    the dimensions and views that it declares. A non-default value of a key that no active transform serves is an error."""
    mesh: MeshUse = MeshUse()
    """The dimensions and views that it adds, and the dimensions over which it sums gradients."""
    extras: tuple[str, ...] = ()
    """Names of the extra tensors that its batch transforms add (:class:`~titan_core.api.Extra`)."""
    adds: tuple[str, ...] = ()
    """Patterns of the parameters that ``apply`` adds to the part, whose layout it gives their rules and initial values:
    ``("*.lora_A", "*.lora_B")``. They are trained whatever ``training.freeze`` says. Weights that a run starts from need not
    have them; a stored model that has them also has the transform's section, which must therefore name no file."""
    check: Ref[Callable[[JobContext[Any]], Iterable[Problem]]] | None = None
    """Returns the reasons why the job cannot run, before anything is built. Called if active; must not import torch."""
    checks: Checks = Checks()
    """Checks of the built model and of the machine."""
    steps: StepUse = StepUse()
    """Work in a step, or between steps."""
    planning: Planning = Planning()
    """What ``titan plan`` and ``titan estimate`` may know of it."""

    @property
    def served(self) -> frozenset[str]:
        """All config keys that this transform implements."""
        parts: tuple[MeshDim | MeshView, ...] = (*self.mesh.dims, *self.mesh.views)
        return frozenset((*self.serves, *(part.degree_key for part in parts)))
