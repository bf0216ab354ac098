"""A trial of the job's division on its own ranks, before the model gets its weights.

A small copy of the model (:mod:`titan_core.model.small_copy`) goes through the job's own transforms on the job's own mesh,
forward and backward. Each rank also computes the undivided copy, and compares the gradients of the parameters that it holds
with those of one device. All parallelisms are tried by this code, those of third parties too.

Not tried are precisions, which change numbers, and the compiler: the trial computes eagerly, in fp32. Blocks that are built
like an earlier one are left out, unless a pipeline divides them. A copy that does not fit on one device is not tried, with a
warning.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_core.api import (
    Job,
    JobMesh,
    ModelPart,
    Objective,
    ObjectiveFunction,
    Phase,
    Problem,
    StepRunner,
    Transform,
    UserError,
    World,
)
from titan_core.api.config.sections import ObjectiveSection
from titan_core.api.parallel.step import GradientAccumulation
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.model.division_problem import described, divides, problem_of
from titan_core.model.loss_head import attach, build_objective
from titan_core.model.materialise import local_box
from titan_core.model.next_token import NextToken
from titan_core.model.part_guard import parts_of
from titan_core.model.small_copy import box_of, copy_weights, draw_weights, named_parameters, short_windows, small_copy
from titan_core.model.streams import begin_streams
from titan_core.model.trial_batch import TrialBatch, trial_batch
from titan_core.model.trial_differences import (
    Recorder,
    Share,
    WrongGradient,
    compare_gradients,
    first_difference,
    last_difference,
    share_that_fails,
)
from titan_core.plugins.lifecycle import Lifecycle
from titan_core.toolkit.errors import caused_by_peer
from titan_core.toolkit.random_state import same_generators
from titan_core.toolkit.simulation import current_simulation
from titan_core.torch_private import version_of

log = logging.getLogger(__name__)

_NOT_TRIED = "the gradients of the divided model are not compared with those of one device before the first step"
_ROUNDING = 2e-4
"""Relative difference of gradients that rounding explains. In fp32 it is some 1e-6, more after many blocks."""
_ROUNDING_ON_GPU = 1e-3
"""The same where kernels may round products to fewer bits, each in its own way."""
_SEEDS = (0, 1)
"""A division is refused if it fails with all of these: rounding may send a token to another expert once."""
_SHARE_OF_MEMORY = 0.8
"""Share of a GPU's free memory that the undivided copy and its gradients may take."""
_BYTES_ON_CPU = 2.0**31
"""The same on a CPU, whose memory several ranks share."""
_COLLECTED = 2.0**26
"""Bytes of a copy that is freed at once, which takes a tenth of a second, rather than by Python's next collection."""
_KEEPS_ALL_BLOCKS = 2**24
"""Largest model, in parameters, of which a pipeline is tried with all blocks, so that each stage has some."""


def try_division(model: nn.Module, job: AssembledJob, world: World, loss_in_head: bool) -> None:
    """Try the division of ``model``, which is whole and on the meta device. All ranks must call it.

    Args:
        loss_in_head: whether the last module computes the loss.

    Raises:
        UserError: a gradient differs from one device's, or the divided copy raised an error; on every rank.
    """
    plan = job.mesh
    if plan.world_size == 1 or current_simulation() is not None:
        return
    layout = job.model.layout
    layers = any(plan.degrees[dim.name] > 1 for dim in plan.dims if dim.divides == "layers")
    size = sum(parameter.numel() for parameter in model.parameters())
    copy = small_copy(model, layout, all_blocks=layers and size <= _KEEPS_ALL_BLOCKS)
    if job.added and not any(parameter.requires_grad for parameter in copy.parameters()):
        copy.requires_grad_()  # the copy lacks the parameters that are trained
    job = replace(job, model=replace(job.model, layout=short_windows(copy, layout)))
    needed, most = 8.0 * sum(parameter.numel() for parameter in copy.parameters()), _memory(world.device)
    if needed > most:
        log.warning("%s: one device has no memory for a block of each kind (%.1f GiB)", _NOT_TRIED, needed / 2**30)
        return
    with ExitStack() as stack:
        stack.enter_context(same_generators())
        stack.enter_context(_quiet())
        stack.enter_context(_exact_matmuls())
        problems = _problems(copy, job, world, loss_in_head)
    if needed > _COLLECTED:
        gc.collect()  # hooks make cycles of modules, which hold weights and gradients
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
    if _replaced(job.objective) and world.rank == 0:
        log.info(
            "the division of the model is tried with the loss of the next token, not with objective %r, whose extra tensors "
            "have no values before the first step",
            job.objective.name,
        )
    for transform in job.transforms if world.rank == 0 and not problems else ():
        if transform.mesh.tolerance and divides(transform, job):
            declared = 100 * transform.mesh.tolerance
            log.info("transform %r: its gradients may differ from one device's by %.3g %%", transform.name, declared)
    if isinstance(problems, str):
        log.warning("%s: the undivided model raised %s", _NOT_TRIED, problems)
    elif problems:
        raise UserError(*problems)


def _problems(copy: nn.Module, job: AssembledJob, world: World, loss_in_head: bool) -> list[Problem] | str:
    """Return what is wrong with the division; a string: the error for which the undivided copy cannot be computed."""
    problems: list[Problem] = []
    for seed in _SEEDS:
        trial = _MeshTrial(copy, job, world, loss_in_head, seed)
        if trial.error:
            return trial.error
        if not trial.differs():
            return []
        problems = trial.problems() if seed == _SEEDS[-1] else []
    return problems


class _MeshTrial:
    """One trial: the undivided and the divided copy, and their gradients."""

    def __init__(self, copy: nn.Module, job: AssembledJob, world: World, loss_in_head: bool, seed: int) -> None:
        self._job, self._world = job, world
        rounding = _ROUNDING if world.device.type == "cpu" else _ROUNDING_ON_GPU
        self._bound = rounding + sum(one.mesh.tolerance for one in job.transforms if divides(one, job))
        self._batch = trial_batch(job, world, seed)
        self.error = ""
        """The error of the undivided copy, if it cannot be computed: an objective may need more than tokens."""
        try:
            self._one = _one_device(copy, job, self._batch, world.device, seed)
            trains = self._compute_one()
        except Exception as error:  # noqa: BLE001 - the model's code may raise anything
            self.error = _text(error)
            return
        self._several = _Divided(copy, job, self._batch, world, loss_in_head, self._one.module)
        for part in self._several.parts:
            part.module.train(trains)

    def differs(self) -> bool:
        """Return whether a gradient differs, on any rank."""
        self._compute_several()
        found = torch.tensor(float(bool(self._wrong_gradients())))
        return bool(self._world.max(found) > 0)

    def problems(self) -> list[Problem]:
        """Compute once more and describe the differences of all ranks."""
        layout = self._one.layout
        units = [*layout.embedding, *self._one.blocks(), *layout.head]
        mixers = [name for name, _ in self._one.named_modules() if layout.mixer(name) is not None]
        with Recorder([self._one.module], {*units, *mixers}) as one:
            self._compute_one()
        with Recorder([part.module for part in self._several.parts], {*units, *mixers}) as several:
            self._compute_several()
        batch = self._batch
        rows = [row for microbatch in batch.rows for row in microbatch]
        share = Share(rows, self._several.columns(), len(batch.whole.tokens))
        forward = first_difference(one, several, share)
        backward = last_difference(one, several, share, batch.repeats)
        found = self._world.gather((forward, backward, self._wrong_gradients()))
        return [described(self._job, one.order(), found, self._bound)]

    def _compute_one(self) -> bool:
        """Compute the gradients of one device.

        Returns:
            Whether the model is in training mode. One whose forward passes change its buffers, such as a running statistic,
            would see those of another number of passes on each rank; it is tried in evaluation mode.
        """
        runner, module = GradientAccumulation(self._one), self._one.module
        before = _buffers(module)
        module.zero_grad()
        runner(self._batch.inputs_of_one_device())
        if module.training and _buffers(module) != before:
            module.eval()
            module.zero_grad()
            runner(self._batch.inputs_of_one_device())
        return module.training

    def _compute_several(self) -> None:
        """Compute the gradients of the divided copy.

        Raises:
            UserError: it raised an error. The undivided copy did not.
        """
        try:
            self._several.compute()
        except UserError:
            raise
        except Exception as error:
            if caused_by_peer(error):
                raise
            why = (
                share_that_fails(error, self._several.parts) or f"a trial of its forward and backward raised {_text(error)}"
            )
            raise UserError(problem_of(self._job, why)) from error

    def _wrong_gradients(self) -> dict[str, WrongGradient]:
        """Return this rank's gradients that differ from those of one device, by the name of the parameter."""
        expected = {name: parameter.grad for name, parameter in named_parameters(self._one.module).items()}
        norms = {name: float(gradient.norm()) for name, gradient in expected.items() if gradient is not None}
        total = sum(norm**2 for norm in norms.values()) ** 0.5
        wrong: dict[str, WrongGradient] = {}
        for part in self._several.parts:
            for name, parameter in part.named_parameters():
                if not parameter.requires_grad:
                    continue
                local, offset = local_box(parameter)
                own = _local_gradient(parameter)
                whole = expected[name]
                wanted = torch.zeros_like(local) if whole is None else box_of(whole, local, offset)
                found = torch.zeros_like(wanted) if own is None else own.to(wanted.device)
                bound = self._bound * norms.get(name, 0.0) + 1e-6 * total
                difference = compare_gradients(found, wanted, bound)
                if difference is not None:
                    wrong[name] = difference
        return wrong


class _Divided:
    """The divided copy on this rank."""

    def __init__(
        self, copy: nn.Module, job: AssembledJob, batch: TrialBatch, world: World, loss_in_head: bool, whole: nn.Module
    ) -> None:
        small, mesh, device = batch.job, world.mesh, world.device
        self._batch, self._lifecycle = batch, Lifecycle()
        self.parts = [_part(copy, job, small, mesh, device)]
        applied = [transform for transform in job.transforms if transform.phase not in (Phase.PRECISION, Phase.COMPILE)]
        for transform in applied:
            context = transform.training_context(small, mesh, device)
            self.parts = [result for part in self.parts for result in _apply(transform, context, part)]
        for part in self.parts:
            if loss_in_head:
                attach(part, job.config.section(ObjectiveSection).chunk_tokens)
            copy_weights(part, whole, device)
            begin_streams(part.module, device)
        self._runner: StepRunner = GradientAccumulation(self.parts[0])
        for transform in applied:
            context = transform.training_context(small, mesh, device)
            if transform.phase is Phase.PIPELINE and transform.steps.runner is not None:
                self._runner = transform.steps.runner.call(StepRunner, self._runner, self.parts, context)
            if transform.steps.observer is not None and divides(transform, small):
                self._lifecycle.register(
                    transform.steps.observer.load()(self.parts, context), origin=job.registry.origin(transform)
                )

    def compute(self) -> None:
        """Compute this rank's gradients, and complete them."""
        for part in self.parts:
            part.module.zero_grad()
        self._runner(self._batch.inputs())
        self._lifecycle.gradients_complete(1)

    def columns(self) -> Tensor | None:
        """Return the positions that this rank holds of each sequence; ``None``: all."""
        columns = self.parts[0].transformed(self._batch.inputs().batches[0]).columns
        return None if columns is None else columns[0]


def _one_device(copy: nn.Module, job: AssembledJob, batch: TrialBatch, device: torch.device, seed: int) -> ModelPart:
    """Return the undivided copy with weights, after the transforms that do not divide the model but change its loss."""
    small, mesh = batch.one_device(), cast(JobMesh, _OneDevice())
    part = _part(copy, job, small, mesh, device)
    for transform in job.transforms:
        others = Phase.PRECISION, Phase.COMPILE, Phase.RECOMPUTE
        if transform.phase not in others and not divides(transform, batch.job):
            (part,) = _apply(transform, transform.training_context(small, mesh, device), part)
    draw_weights(part, device, seed)
    begin_streams(part.module, device)
    part.module.train()
    return part


class _OneDevice:
    """The mesh of one device, which has no dimension."""

    names: tuple[str, ...] = ()

    def __contains__(self, name: object) -> bool:
        return False

    def __getitem__(self, name: object) -> Any:
        raise KeyError(name)

    def view_of(self, parameter: Tensor) -> None:
        """See :meth:`JobMesh.view_of`."""


def _part(copy: nn.Module, job: AssembledJob, small: Job, mesh: JobMesh, device: torch.device) -> ModelPart:
    objective: ObjectiveFunction = NextToken()
    if not _replaced(job.objective):
        objective = build_objective(job.objective, job.objective.training_context(small, mesh, device))
    return ModelPart(deepcopy(copy), small.model.layout, objective)


def _replaced(objective: Objective) -> bool:
    """Whether the trial computes the loss of the next token in place of that of ``objective``, which needs values that only
    its dataset, or a reference model, has. The gradients of any loss show whether the model is divided correctly."""
    return bool(objective.extras) or objective.reference is not None


def _apply(transform: Transform, context: Any, part: ModelPart) -> Sequence[ModelPart]:
    if transform.apply is None:
        return [part]
    return parts_of(transform.name, transform.apply.load()(part, context))


def _local_gradient(parameter: nn.Parameter) -> Tensor | None:
    gradient: Tensor | None = parameter.grad
    if not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(parameter, DTensor)
    if any(placement.is_partial() for placement in gradient.placements):
        gradient = gradient.redistribute(placements=parameter.placements)
    return gradient.to_local()


def _memory(device: torch.device) -> float:
    """Return the bytes that the undivided copy and its gradients may take."""
    return _SHARE_OF_MEMORY * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _BYTES_ON_CPU


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _buffers(module: nn.Module) -> list[tuple[int, int]]:
    """Return what differs if a buffer is written to or replaced."""
    return [(id(buffer), version_of(buffer)) for buffer in module.buffers()]


@contextmanager
def _quiet() -> Iterator[None]:
    """Log nothing that the transforms will log again when they are applied to the model itself."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _exact_matmuls() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
