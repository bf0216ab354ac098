"""Registers the optimizers, phases of the learning rate, and averages of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan_core.api import Checks, Command, LRSchedule, Optimizer, Phase, Planning, Ref, StepUse, Transform, hookimpl
from titan_optim.config import MUP_OPTIMIZER, AveragesSection, MuonSection, MuPSection
from titan_optim.lr_phases_config import NAME, LRPhasesSection

if TYPE_CHECKING:
    from titan_core.api.plugins.assembled_job import AssembledJob
    from titan_core.toolkit.hookspecs import JobFact

api = (1, 0)


@hookimpl
def titan_optimizers() -> list[Optimizer]:
    return [
        Optimizer(
            name="Muon",
            summary="orthogonalised momentum for matrices of hidden layers, each computed by one rank; AdamW for the rest",
            config=MuonSection,
            build=Ref("titan_optim.muon:build"),
            costs=Ref("titan_optim.costs:of_muon"),
        ),
        Optimizer(
            name="AdamWBF16",
            summary="AdamW with its running means in bfloat16, rounded stochastically, equally on any mesh",
            build=Ref("titan_optim.adamw_bf16:build"),
            costs=Ref("titan_optim.costs:of_adamw_bf16"),
        ),
        Optimizer(
            name=MUP_OPTIMIZER,
            summary="AdamW with learning rates that transfer from a narrow base model (muP)",
            config=MuPSection,
            build=Ref("titan_optim.mup:build"),
        ),
    ]


@hookimpl
def titan_lr_schedules() -> list[LRSchedule]:
    return [
        LRSchedule(
            name=NAME,
            summary="phases of steps or tokens, each with its own shape",
            config=LRPhasesSection,
            build=Ref("titan_optim.lr_phases:build"),
            check=Ref("titan_optim.lr_phases:check"),
        )
    ]


@hookimpl
def titan_job_facts(job: AssembledJob) -> list[JobFact]:
    if job.lr_schedule.name != NAME:
        return []
    from titan_optim.lr_phases import job_facts

    return job_facts(job)


@hookimpl
def titan_commands() -> list[Command]:
    return [
        Command(
            name="mup check",
            group="look",
            summary="train models of several widths for a few steps, and compare how their activations change",
            overrides=True,
            arguments=Ref("titan_optim.mup_check_command:arguments"),
            run=Ref("titan_optim.mup_check_command:run"),
        ),
    ]


@hookimpl
def titan_parallelisms() -> list[Transform]:
    return [
        Transform(
            name="mup",
            summary="initial values that transfer from a narrow base model (muP)",
            config=MuPSection,
            phase=Phase.PIPELINE,  # of the whole model, before the transform `pipeline`
            active=lambda context: bool(context.section.base) and context.job.trains,
            check=Ref("titan_optim.checks:check_mup"),
            checks=Checks(model=Ref("titan_optim.mup:check_model")),
            apply=Ref("titan_optim.mup:apply"),
        ),
        Transform(
            name="averaged_weights",
            summary="averages of the weights of successive steps, validated beside them and saved",
            config=AveragesSection,
            phase=Phase.DATA,
            active=lambda context: context.section.kind != "none",
            check=Ref("titan_optim.checks:check_averages"),
            planning=Planning(costs=Ref("titan_optim.costs:of_averages")),
            steps=StepUse(observer=Ref("titan_optim.averages:AveragedWeights")),
        ),
    ]
