"""The commands of titan-simulate."""

from __future__ import annotations

from titan_core.api.command import Command
from titan_core.api.hookspecs import hookimpl
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
            name="calibrate",
            summary="measure this machine and describe it for `titan estimate` and `titan plan`",
            arguments=Ref("titan_simulate.cli.calibrate:arguments"),
            run=Ref("titan_simulate.cli.calibrate:run"),
        ),
    ]
