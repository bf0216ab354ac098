"""The components that titan-launch contributes."""

from __future__ import annotations

from titan_core.api.health import HealthCheck
from titan_core.api.hookspecs import hookimpl
from titan_core.api.launcher import Launcher
from titan_core.api.ref import Ref
from titan_core.api.tools.phases import StatusDisplay

api = (1, 0)


@hookimpl
def titan_health_checks() -> list[HealthCheck]:
    return [
        HealthCheck(
            name="rendezvous",
            summary="whether this machine can reach --rdzv-endpoint",
            check=Ref("titan_launch.health:check"),
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
def titan_status_displays() -> list[StatusDisplay]:
    return [
        StatusDisplay(
            name="terminal",
            summary="the last line of a terminal; elsewhere, a line for each phase that lasts",
            show=Ref("titan_launch.status_line:StatusLine"),
        ),
    ]
