"""The components that titan-launch contributes."""

from __future__ import annotations

import os

from titan_core.api import Command, HealthCheck, Observer, Ref, hookimpl
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.launching import RESTART, Launcher, reported_by_launcher
from titan_launch.config import GarbageKeys

api = (1, 0)


@hookimpl
def titan_health_checks() -> list[HealthCheck]:
    return [
        HealthCheck(
            name="rendezvous",
            summary="whether this machine can reach --rdzv-endpoint",
            check=Ref("titan_launch.meeting.health:check"),
        ),
    ]


@hookimpl
def titan_debuggers() -> list[Observer]:
    return [
        Observer(
            name="garbage_collection",
            summary="collects Python's garbage at the same steps on all ranks",
            config=GarbageKeys,
            active=lambda context: context.section.gc_freq > 0,
            build=Ref("titan_launch.ranks.garbage:GarbageCollection"),
        ),
        Observer(
            name="progress",
            summary="lets the launcher see how far each rank is",
            active=lambda context: reported_by_launcher(),
            build=Ref("titan_launch.ranks.progress:ProgressFile"),
        ),
        Observer(
            name="recovery",
            summary="reports what a restart cost",
            active=lambda context: RESTART in os.environ,
            build=Ref("titan_launch.restart.recovery:RecoveryReport"),
        ),
    ]


@hookimpl
def titan_launchers() -> list[Launcher]:
    return [
        Launcher(
            name="local",
            summary="processes on this machine, alone or as part of a multi-machine job",
            arguments=Ref("titan_launch.options:arguments"),
            run=Ref("titan_launch.options:run"),
        ),
    ]


@hookimpl
def titan_commands() -> list[Command]:
    return [
        Command(
            name="rendezvous",
            group="clusters",
            rare=True,
            summary="host the store where the machines of jobs meet, on a machine that outlives them",
            arguments=Ref("titan_launch.meeting.host:arguments"),
            run=Ref("titan_launch.meeting.host:run"),
        ),
    ]


@hookimpl
def titan_job_assembled(job: AssembledJob) -> None:
    """Bind this process to the cores near its GPU if it is a rank."""
    if "LOCAL_RANK" in os.environ:
        from titan_launch.ranks.numa import bind

        bind(job, os.environ)
