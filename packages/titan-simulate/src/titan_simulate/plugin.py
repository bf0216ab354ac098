"""The components that titan-simulate contributes."""

from __future__ import annotations

from titan_core.api.command import Command
from titan_core.api.hookspecs import hookimpl
from titan_core.api.launcher import Launcher
from titan_core.api.ref import Ref

api = (1, 0)


@hookimpl
def titan_commands() -> list[Command]:
    return [
        Command(
            name="simulate",
            summary="run one rank of a job of any size without a GPU: memory, collectives and launches",
            arguments=Ref("titan_simulate.cli.simulate:arguments"),
            run=Ref("titan_simulate.cli.simulate:run"),
            overrides=True,
        ),
        Command(
            name="estimate",
            summary="memory and speed of a job on a machine, without a GPU",
            arguments=Ref("titan_simulate.cli.estimate:arguments"),
            run=Ref("titan_simulate.cli.estimate:run"),
            overrides=True,
        ),
        Command(
            name="plan",
            summary="find the fastest mesh, schedule, recomputation and batch split for a number of GPUs",
            arguments=Ref("titan_simulate.cli.plan:arguments"),
            run=Ref("titan_simulate.cli.plan:run"),
            overrides=True,
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
