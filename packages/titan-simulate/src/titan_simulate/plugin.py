"""The components that titan-simulate contributes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan_core.api import Command, Ref, hookimpl
from titan_core.toolkit.launching import Launcher

if TYPE_CHECKING:
    from titan_core.api.plugins.assembled_job import AssembledJob
    from titan_core.toolkit.hookspecs import JobFact

api = (1, 0)


@hookimpl
def titan_commands() -> list[Command]:
    return [
        Command(
            name="simulate",
            group="plan",
            summary="run one rank of a job of any size without a GPU: memory, collectives and launches",
            arguments=Ref("titan_simulate.cli.simulate:arguments"),
            run=Ref("titan_simulate.cli.simulate:run"),
            overrides=True,
        ),
        Command(
            name="estimate",
            group="plan",
            summary="memory and speed of a job on a machine, without a GPU",
            arguments=Ref("titan_simulate.cli.estimate:arguments"),
            run=Ref("titan_simulate.cli.estimate:run"),
            overrides=True,
        ),
        Command(
            name="plan",
            group="plan",
            summary="find the fastest mesh, schedule, recomputation and batch split for a number of GPUs",
            arguments=Ref("titan_simulate.cli.plan:arguments"),
            run=Ref("titan_simulate.cli.plan:run"),
            overrides=True,
        ),
        Command(
            name="calibrate",
            group="plan",
            rare=True,
            summary="measure this machine and describe it for `titan estimate` and `titan plan`",
            arguments=Ref("titan_simulate.cli.calibrate:arguments"),
            run=Ref("titan_simulate.cli.calibrate:run"),
        ),
    ]


@hookimpl
def titan_launchers() -> list[Launcher]:
    return [
        Launcher(
            name="dry-run",
            summary="one step of one rank without its hardware and the other ranks",
            arguments=Ref("titan_simulate.cli.dry_run:arguments"),
            run=Ref("titan_simulate.cli.dry_run:run"),
            commands=("train",),
        ),
    ]


@hookimpl
def titan_job_facts(job: AssembledJob) -> list[JobFact]:
    """Return the least memory of a rank."""
    from titan_simulate.estimate.job_memory import memory_fact

    return [memory_fact(job)]


@hookimpl
def titan_job_assembled(job: AssembledJob) -> None:
    """Warn about a job that cannot fit its device."""
    from titan_simulate.estimate.job_memory import warn_if_too_large

    warn_if_too_large(job)
