"""Objectives, optimizers and learning-rate schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan_core.api.plugins.component import Component
from titan_core.api.plugins.errors import Problem
from titan_core.api.plugins.job import Job, JobContext, TrainingContext
from titan_core.api.plugins.ref import Ref

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer as TorchOptimizer
    from torch.optim.lr_scheduler import LRScheduler

    from titan_core.api.parallel.job_mesh import JobMesh
    from titan_core.api.parallel.planning import OptimizerCosts
    from titan_core.api.training.batch import ObjectiveFunction
    from titan_core.api.training.optimizer import LRScheduleContext, OptimizerContext, ParamGroup


@dataclass(frozen=True, kw_only=True)
class Optimizer(Component):
    """An optimizer, selected by ``optimizer.name``."""

    kind = "optimizer"
    keys = ("optimizer.name",)
    build: Ref[Callable[[OptimizerContext[Any]], TorchOptimizer]]
    """Builds it on each rank, once the model is divided and has its initial values; a checkpoint is restored later."""
    costs: Ref[Callable[[JobContext[Any]], OptimizerCosts]] | None = None
    """Returns what ``titan plan`` and ``titan estimate`` may know of it. Must not import torch. Without it, they assume the
    costs of AdamW."""

    def optimizer_context(
        self, job: Job, mesh: JobMesh, device: torch.device, groups: Sequence[ParamGroup]
    ) -> OptimizerContext[Any]:
        """Return the context with which the optimizer is built."""
        from titan_core.api.training.optimizer import OptimizerContext  # imports torch

        section = self.section_in(job.config)
        return OptimizerContext(section=section, job=job, mesh=mesh, device=device, groups=groups)


@dataclass(frozen=True, kw_only=True)
class Objective(Component):
    """The loss that training minimises, selected by ``objective.name``."""

    kind = "objective"
    keys = ("objective.name",)
    build: Ref[Callable[[TrainingContext[Any]], ObjectiveFunction]]
    """Returns what computes the loss, on each rank, before the transforms that may wrap it. Also called for the copies of
    the model that are tried before step 1."""
    check: Ref[Callable[[JobContext[Any]], Iterable[Problem]]] | None = None
    """Returns the reasons why the job cannot run, before anything is built. Must not import torch."""
    extras: tuple[str, ...] = ()
    """Names of the extra tensors of a batch (:class:`~titan_core.api.Extra`) that it needs."""
    reference: Ref[Callable[[JobContext[Any]], Mapping[str, Any]]] | None = None
    """For objectives that compare the model with one that is not trained, such as a reference policy or a teacher: returns
    the keys of ``[model]`` that describe the reference model, such as ``{"model.from_pretrained": path}``. No keys: the
    model that the run starts from. It is divided like the trained model, takes no part in updates and checkpoints, and
    computes :meth:`~titan_core.api.ObjectiveFunction.of_reference` before each step and evaluation. Must not import
    torch."""


@dataclass(frozen=True, kw_only=True)
class LRSchedule(Component):
    """A learning-rate schedule, selected by ``lr_scheduler.name``.

    Its keys are in the section that :attr:`Component.config` names: a class with ``section = "lr_scheduler"`` adds them to
    ``[lr_scheduler]``, beside ``name``, and any other name is a section of its own. The keys that titan-core has there
    (``warmup_steps`` ...) are those of ``"wsd"``."""

    kind = "lr schedule"
    keys = ("lr_scheduler.name",)
    build: Ref[Callable[[LRScheduleContext[Any]], LRScheduler]]
    """Builds it for all steps of the job; a resumed run then loads its state."""
    check: Ref[Callable[[JobContext[Any]], Iterable[Problem]]] | None = None
    """Returns the reasons why the job cannot follow it, before anything is built. Must not import torch."""
