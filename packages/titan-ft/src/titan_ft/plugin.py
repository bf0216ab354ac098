"""The components that titan-ft contributes."""

from __future__ import annotations

from titan_core.api import Checks, Command, HealthCheck, Phase, Ref, StepUse, Transform, hookimpl
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.launching import leave_loopback
from titan_core.toolkit.listening import is_loopback
from titan_ft.check import lighthouse_of, own_host
from titan_ft.config import FaultToleranceSection

api = (1, 0)


@hookimpl
def titan_parallelisms() -> list[Transform]:
    return [
        Transform(
            name="fault_tolerance",
            summary="replica groups that survive each other's faults, with torchft",
            config=FaultToleranceSection,
            phase=Phase.DATA,
            active=lambda context: context.section.enable and context.job.trains,
            check=Ref("titan_ft.check:check"),
            checks=Checks(hardware=Ref("titan_ft.check:check_machine")),
            apply=Ref("titan_ft.step:apply"),
            steps=StepUse(runner=Ref("titan_ft.step:SharedStep"), observer=Ref("titan_ft.step:observe")),
        )
    ]


@hookimpl
def titan_job_assembled(job: AssembledJob) -> None:
    """Let this rank's sums leave the machine if other groups may be elsewhere: its launcher knows of none."""
    section = job.config.section(FaultToleranceSection)
    if section.enable and not is_loopback(own_host(lighthouse_of(section))):
        leave_loopback()


@hookimpl
def titan_commands() -> list[Command]:
    return [
        Command(
            name="ft lighthouse",
            group="clusters",
            summary="start the server at which replica groups meet",
            arguments=Ref("titan_ft.lighthouse:arguments"),
            run=Ref("titan_ft.lighthouse:run"),
        )
    ]


@hookimpl
def titan_health_checks() -> list[HealthCheck]:
    return [
        HealthCheck(
            name="fault tolerance",
            summary="whether replica groups can use torchft here",
            check=Ref("titan_ft.check:check_health"),
        )
    ]
