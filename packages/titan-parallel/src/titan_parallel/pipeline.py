"""Pipeline parallelism: the model cut into stages that torch's schedules run (TorchTitan paper, section 2.2;
:mod:`titan_parallel.pipeline_plan` lists the schedules' papers)."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    get_schedule_class,
)  # fmt: skip

from titan_core.api import Batch, Microbatch, ModelPart, StepInput, StepRunner, TrainingContext
from titan_core.api.config.sections import TrainingSection
from titan_core.api.parallel.microbatch import microbatch_scope
from titan_core.api.parallel.model_part import PrunedModule, arguments_of
from titan_core.api.training.batch import join_batches, with_positions
from titan_core.toolkit.simulation import current_simulation
from titan_parallel.config import PipelineKeys, TensorParallelKeys
from titan_parallel.pipeline_plan import PipelinePlan, plan_pipeline
from titan_parallel.tied_stages import TiedStages, ties_within
from titan_parallel.torch_private import StageFixes, schedule_from_csv

log = logging.getLogger(__name__)


def apply(part: ModelPart, context: TrainingContext[PipelineKeys]) -> list[ModelPart]:
    """Return this rank's stages, in order. ``part`` is still on the meta device, so copies of it cost nothing."""
    plan = plan_pipeline(context.job)
    log.info("pipeline: %s; %d microbatches per step", _describe(plan), plan.microbatches)
    return [_stage(part, plan.stages[stage]) for stage in plan.stages_of(_rank(context))]


def make_step(runner: StepRunner, parts: Sequence[ModelPart], context: TrainingContext[PipelineKeys]) -> StepRunner:
    """Return the step that passes all of a rank's sequences through the pipeline in one run of the schedule."""
    return PipelineStep(parts, context)


class PipelineStep:
    """A training or evaluation step run by one of torch's schedules."""

    def __init__(self, parts: Sequence[ModelPart], context: TrainingContext[PipelineKeys]) -> None:
        plan = plan_pipeline(context.job)
        self._numbers = plan.stages_of(_rank(context))
        self._last = len(plan.stages) - 1
        self._part = parts[0]
        self._target_weight: float | Tensor = 1.0
        self._device = context.device
        group = context.mesh["pp"].get_group()
        self._stages = [
            _Stage(part, number, len(plan.stages), context.device, group, _known_shapes(part, number, plan, context))
            for number, part in zip(self._numbers, parts, strict=True)
        ]
        self._microbatches = plan.microbatches
        self._ties = TiedStages(dict(zip(self._numbers, parts, strict=True)), plan, context)
        self._schedule = self._make_schedule(self._stages, plan, context.section)

    def __call__(self, inputs: StepInput) -> Tensor:
        """See :class:`~titan_core.api.StepRunner`."""
        tokens, arguments = self._prepare(inputs)
        self._target_weight = inputs.target_weight
        losses: list[Tensor] = []
        self._ties.copy_weights()
        self._schedule.step(*tokens, **arguments, losses=losses, return_outputs=False)
        self._ties.add_gradients()
        return self._sum(losses)

    @torch.no_grad()
    def evaluate(self, inputs: StepInput) -> Tensor:
        """See :class:`~titan_core.api.StepRunner`."""
        tokens, arguments = self._prepare(inputs)
        self._target_weight = 1.0
        losses: list[Tensor] = []
        self._ties.copy_weights()
        self._schedule.eval(*tokens, **arguments, losses=losses, return_outputs=False)
        return self._sum(losses)

    def _prepare(self, inputs: StepInput) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Join all batches of the step into one, which the schedule splits into its own microbatches.

        Returns:
            The schedule's positional and keyword arguments. Stages look up their microbatches by number.
        """
        whole = join_batches([with_positions(self._part.transformed(batch)) for batch in inputs.batches])
        microbatches = replace(inputs, batches=whole.split(len(whole.tokens) // self._microbatches)).microbatches()
        for stage in self._stages:
            stage.microbatches = microbatches
        tokens = (whole.tokens,) if 0 in self._numbers else ()
        arguments: dict[str, Any] = arguments_of(whole, self._part.layout)
        # The schedule passes each microbatch's "target", here its number, to the loss.
        arguments["target"] = torch.arange(self._microbatches) if self._last in self._numbers else None
        return tokens, arguments

    def _sum(self, losses: list[Tensor]) -> Tensor:
        return torch.stack(losses).detach().sum() if losses else torch.zeros((), device=self._device)

    def _make_schedule(
        self, stages: list[_Stage], plan: PipelinePlan, keys: PipelineKeys
    ) -> PipelineScheduleSingle | PipelineScheduleMulti:
        # The loss is divided by the weight of the global batch, so gradients need no further scaling.
        options: dict[str, Any] = {"loss_fn": self._loss_of, "scale_grads": False}
        if keys.pipeline_parallel_schedule_csv:
            return schedule_from_csv(keys.pipeline_parallel_schedule_csv, stages, plan.microbatches, **options)
        make = get_schedule_class(keys.pipeline_parallel_schedule)
        if issubclass(make, PipelineScheduleSingle):
            return make(stages[0], plan.microbatches, **options)
        schedule: PipelineScheduleMulti = make(stages, plan.microbatches, **options)
        return schedule

    def _loss_of(self, output: Tensor, number: Tensor) -> Tensor:
        stage = self._stages[-1]
        microbatch = stage.microbatches[int(number)]
        with microbatch_scope(microbatch):
            return stage.part.loss_of(output, microbatch.batch) / self._target_weight


class _Stage(StageFixes, PipelineStage):
    """A stage that makes each microbatch current while its modules compute it."""

    def __init__(
        self,
        part: ModelPart,
        number: int,
        count: int,
        device: torch.device,
        group: dist.ProcessGroup,
        shapes: Mapping[str, Any],
    ) -> None:
        super().__init__(part.module, number, count, device, group=group, **shapes)
        self.part = part
        self.microbatches: list[Microbatch] = []
        """Microbatches of the current step."""

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **keywords: Any) -> Any:
        """Run the forward pass of one microbatch."""
        with self.part.computing(self.microbatches[fwd_chunk_id]):
            return super().forward_one_chunk(fwd_chunk_id, *arguments, **keywords)


def _known_shapes(
    part: ModelPart, number: int, plan: PipelinePlan, context: TrainingContext[PipelineKeys]
) -> dict[str, Tensor]:
    """Return examples of a microbatch's input and output of stage ``number``, as arguments of ``PipelineStage``, if the job
    is simulated. Otherwise stages learn their shapes from each other, which also finds a model with other hidden states."""
    if current_simulation() is None:
        return {}
    job, layout = context.job, part.layout
    whole = torch.empty(
        context.section.pipeline_parallel_microbatch_size, job.batch.seq_len, dtype=torch.int64, device="meta"
    )
    tokens = part.transformed(Batch(whole, whole)).tokens
    dtype = getattr(torch, job.section(TrainingSection).mixed_precision_param)
    parts = 1 if job.section(TensorParallelKeys).disable_sequence_parallel else job.mesh.degree("tp")
    sequences, positions = layout.states_per_position * tokens.shape[0], tokens.shape[1]
    hidden = torch.empty(sequences, positions // parts, layout.dim, dtype=dtype, device="meta", requires_grad=True)
    logits = torch.empty(sequences, positions, layout.vocab_size, dtype=dtype, device="meta", requires_grad=True)
    loss = torch.empty((), device="meta", requires_grad=True)
    last = loss if part.loss_in_head else logits
    return {
        "input_args": tokens if number == 0 else hidden,
        "output_args": last if number == len(plan.stages) - 1 else hidden,
    }


def _rank(context: TrainingContext[PipelineKeys]) -> int:
    return context.mesh["pp"].get_local_rank()


def _describe(plan: PipelinePlan) -> str:
    stages = (f"{names[0]} to {names[-1]} on rank {rank}" for names, rank in zip(plan.stages, plan.rank_of, strict=True))
    return ", ".join(stages)


def _stage(part: ModelPart, names: tuple[str, ...]) -> ModelPart:
    """Return a copy of ``part`` in which only the modules ``names`` remain, under the same names; the others are pruned."""
    layout = part.layout
    pruned = {*layout.embedding, *part.blocks(), *layout.head} - set(names)
    # What the copy is to have in place of these modules: they need not be copied first.
    module = copy.deepcopy(part.module, {id(part.module.get_submodule(name)): PrunedModule() for name in pruned})
    tied, copies = ties_within(layout, names)
    stage = replace(
        part, module=module, layout=replace(layout, tied=tied), copies=copies, after_evaluation=(), weights_changed=()
    )
    present = {slot: stage.present(entries) for slot, entries in part.slots.items()}
    slots = {slot: {name: part.slots[slot][name] for name in names} for slot, names in present.items()}
    # after_evaluation and weights_changed call the modules of the original. titan_core.model.part_guard refuses a transform
    # that sets them before the pipeline is cut.
    if layout.embedding[0] in names and not any(parameter.requires_grad for parameter in module.parameters()):
        module.register_forward_hook(_require_grad)
    return replace(stage, slots=slots)


def _require_grad(module: nn.Module, arguments: Any, output: Any) -> Any:
    """Make the output of a first stage that is frozen require gradients. Others do because their inputs do, and schedules
    expect it: where an input requires none, those that divide the backward pass silently skip gradients of weights."""
    if isinstance(output, Tensor) and torch.is_grad_enabled() and not output.requires_grad:
        return output.detach().requires_grad_()
    return output
