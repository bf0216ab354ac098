"""What titan-debug contributes."""

from __future__ import annotations

from titan_core.api.command import Command
from titan_core.api.components import Debugger
from titan_core.api.hookspecs import hookimpl
from titan_core.api.ref import Ref
from titan_debug.config import CommTraceSection, NumericsSection, ProfilingSection

api = (1, 0)


@hookimpl
def titan_debuggers() -> list[Debugger]:
    return [
        Debugger(
            name="locate_nan",
            summary="the first module whose output is not finite, when the loss is not",
            config=NumericsSection,
            active=lambda context: context.section.locate_nan,
            build=Ref("titan_debug.numerics.locate_nan:NanLocator"),
        ),
        Debugger(
            name="loss_spike",
            summary="reports losses far above those before them, leaves out their updates, or stops",
            config=NumericsSection,
            active=lambda context: context.section.spike_action != "off",
            build=Ref("titan_debug.numerics.loss_spike:LossSpikes"),
        ),
        Debugger(
            name="mfu",
            summary="the share of the device's peak that training gets out of it, beside the other metrics",
            active=lambda context: True,
            build=Ref("titan_debug.mfu:Mfu"),
        ),
        Debugger(
            name="statistics",
            summary="mean, size and largest element of outputs and gradients, every so many steps or on request",
            config=NumericsSection,
            active=lambda context: True,
            build=Ref("titan_debug.statistics.recorder:StatisticsRecorder"),
        ),
        Debugger(
            name="profiler",
            summary="traces of torch's profiler: every so many steps, and on SIGUSR2",
            config=ProfilingSection,
            active=lambda context: True,
            build=Ref("titan_debug.profiling.profiler:Profiler"),
            check=Ref("titan_debug.profiling.check:check"),
        ),
        Debugger(
            name="memory_snapshots",
            summary="CUDA's memory with the history of its allocations: every so many steps, and when it runs out",
            config=ProfilingSection,
            active=lambda context: context.section.enable_memory_snapshot,
            build=Ref("titan_debug.profiling.memory_snapshots:MemorySnapshots"),
            check=Ref("titan_debug.profiling.check:check_memory"),
        ),
        Debugger(
            name="flight_recorder",
            summary="dumps every rank's collectives and threads when a step takes too long or the run fails",
            config=CommTraceSection,
            active=lambda context: context.section.flight_recorder,
            build=Ref("titan_debug.flight.recorder:FlightRecorder"),
        ),
        Debugger(
            name="crash_report",
            summary="one page about a failed run: the first failure, the other ranks, config and environment",
            active=lambda context: True,
            build=Ref("titan_debug.crash.report:CrashReport"),
        ),
    ]


@hookimpl
def titan_diagnose(run: str, since: float) -> str | None:
    from titan_debug.flight.analysis import verdict_on

    return verdict_on(run, since)


@hookimpl
def titan_commands() -> list[Command]:
    return [
        Command(
            name="flight analyse",
            summary="say which rank holds the others up, and where it is",
            arguments=Ref("titan_debug.cli.flight:analyse_arguments"),
            run=Ref("titan_debug.cli.flight:run_analyse"),
        ),
        Command(
            name="flight dump",
            summary="ask every rank of a running job for its collectives and threads",
            arguments=Ref("titan_debug.cli.flight:dump_arguments"),
            run=Ref("titan_debug.cli.flight:run_dump"),
        ),
        Command(
            name="statistics",
            summary="statistics of modules' outputs and of gradients that a run has written",
            arguments=Ref("titan_debug.cli.statistics:arguments"),
            run=Ref("titan_debug.cli.statistics:run"),
        ),
        Command(
            name="verify",
            summary="train a recipe on several meshes, and say whether the losses are the same",
            arguments=Ref("titan_debug.cli.verify:arguments"),
            run=Ref("titan_debug.cli.verify:run"),
            overrides=True,
        ),
        Command(
            name="trace summary",
            summary="where the time of a profiled step went",
            arguments=Ref("titan_debug.cli.trace:arguments"),
            run=Ref("titan_debug.cli.trace:run"),
        ),
    ]
