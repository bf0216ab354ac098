"""Registers the optimizers, phases of the learning rate, and averages of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan_core.api import LRSchedule, Optimizer, Phase, Ref, StepUse, Transform, hookimpl
from titan_optim.config import AveragesSection, MuonSection
from titan_optim.lr_phases_config import NAME, LRPhasesSection

if TYPE_CHECKING:
    from titan_core.toolkit.jobs import AssembledJob, JobFact

api = (2, 1)


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
def titan_parallelisms() -> list[Transform]:
    return [
        Transform(
            name="averaged_weights",
            summary="averages of the weights of successive steps, validated beside them and saved",
            config=AveragesSection,
            phase=Phase.DATA,
            active=lambda context: context.section.kind != "none",
            check=Ref("titan_optim.averages_check:check"),
            steps=StepUse(observer=Ref("titan_optim.averages:AveragedWeights")),
        ),
    ]
