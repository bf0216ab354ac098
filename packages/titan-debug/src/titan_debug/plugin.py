"""The components, commands and hooks of titan-debug."""

from __future__ import annotations

from titan_core.api import Command, HealthCheck, Observer, Ref, hookimpl
from titan_debug.config import CommTraceSection, NumericsSection, ProfilingSection
from titan_debug.slots import FLOPS

api = (1, 0)


@hookimpl
def titan_debuggers() -> list[Observer]:
    return [
        Observer(
            name="locate_nan",
            summary="names the first module whose output is not finite if the loss is not",
            config=NumericsSection,
            active=lambda context: context.section.locate_nan,
            build=Ref("titan_debug.numerics.locate_nan:NanLocator"),
        ),
        Observer(
            name="loss_spike",
            summary="on a loss far above the preceding ones, warns, skips the update or stops",
            config=NumericsSection,
            active=lambda context: context.section.spike_action != "off",
            build=Ref("titan_debug.numerics.loss_spike:LossSpikes"),
        ),
        Observer(
            name="mfu",
            reads=(FLOPS,),
            summary="adds model FLOPs utilisation to the metrics",
            active=lambda context: True,
            build=Ref("titan_debug.mfu:Mfu"),
        ),
        Observer(
            name="statistics",
            summary="mean, rms and largest element of outputs and gradients, periodically or on request",
            config=NumericsSection,
            active=lambda context: True,
            build=Ref("titan_debug.numerics.statistics_recorder:StatisticsRecorder"),
        ),
        Observer(
            name="device_check",
            summary="repeats a step on other ranks, and names a device that computes something else",
            config=NumericsSection,
            active=lambda context: context.section.replay_freq > 0 or context.job.mesh.world_size > 1,
            build=Ref("titan_debug.devices.device_check:DeviceCheck"),
            check=Ref("titan_debug.devices.groups:check"),
        ),
        Observer(
            name="weight_recorder",
            summary="fingerprints of the weights before the first step and after the last, for certificates",
            config=NumericsSection,
            active=lambda context: context.section.record_weights,
            build=Ref("titan_debug.certificate.fingerprints:WeightRecorder"),
        ),
        Observer(
            name="profiler",
            summary="torch profiler traces, periodically and on SIGUSR2",
            config=ProfilingSection,
            active=lambda context: True,
            build=Ref("titan_debug.profiling.profiler:Profiler"),
            check=Ref("titan_debug.config:check"),
        ),
        Observer(
            name="memory_snapshots",
            summary="CUDA memory with its allocation history, periodically and when memory runs out",
            config=ProfilingSection,
            active=lambda context: context.section.enable_memory_snapshot,
            build=Ref("titan_debug.profiling.memory_snapshots:MemorySnapshots"),
            check=Ref("titan_debug.config:check_memory"),
        ),
        Observer(
            name="flight_recorder",
            summary="dumps every rank's collectives and stacks when a step takes too long or a rank is lost",
            config=CommTraceSection,
            active=lambda context: context.section.flight_recorder,
            build=Ref("titan_debug.flight.recorder:FlightRecorder"),
        ),
        Observer(
            name="stragglers",
            summary="names ranks that are persistently slower than others, and their hosts",
            config=CommTraceSection,
            active=lambda context: context.section.straggler_ratio > 0 and context.job.mesh.world_size > 1,
            build=Ref("titan_debug.stragglers:Stragglers"),
        ),
        Observer(
            name="crash_recorder",
            summary="records why a rank failed: exception, place in the mesh, environment; read by `titan analyse`",
            active=lambda context: True,
            build=Ref("titan_debug.crash.recorder:CrashRecorder"),
        ),
    ]


@hookimpl
def titan_diagnose(run: str, since: float) -> str | None:
    from titan_debug.crash.report import verdict_on

    return verdict_on(run, since)


@hookimpl
def titan_health_checks() -> list[HealthCheck]:
    return [
        HealthCheck(
            name="software",
            summary="Python, torch, NCCL and compilers",
            check=Ref("titan_debug.doctor.software:check"),
        ),
        HealthCheck(
            name="GPUs",
            summary="NVIDIA driver and the state of each GPU",
            check=Ref("titan_debug.doctor.gpus:check"),
        ),
        HealthCheck(
            name="machine",
            summary="cores, memory, shared memory, limits and disk",
            check=Ref("titan_debug.doctor.machine:check"),
        ),
        HealthCheck(
            name="network",
            summary="host name, interfaces and their settings",
            check=Ref("titan_debug.doctor.network:check"),
        ),
        HealthCheck(
            name="computing",
            summary="a matmul on each device, a compiled function, an all-reduce",
            check=Ref("titan_debug.doctor.software:compute"),
            slow=True,
        ),
    ]


@hookimpl
def titan_commands() -> list[Command]:
    return [
        Command(
            name="doctor",
            group="plugins",
            summary="check this machine and the installation: what does not work, and what to do",
            arguments=Ref("titan_debug.cli.doctor:arguments"),
            run=Ref("titan_debug.cli.doctor:run"),
        ),
        *(
            Command(
                name=name,
                group="look",
                rare=name == "analyze",
                summary=summary,
                arguments=Ref("titan_debug.cli.analyse:arguments"),
                run=Ref("titan_debug.cli.analyse:run"),
            )
            for name, summary in (
                ("analyse", "report why a run failed, or which rank holds up the others, and where it is"),
                ("analyze", "the same as analyse"),
            )
        ),
        Command(
            name="flight dump",
            group="look",
            summary="dump the collectives and stacks of every rank of a running job",
            arguments=Ref("titan_debug.cli.flight:arguments"),
            run=Ref("titan_debug.cli.flight:run"),
        ),
        Command(
            name="replay",
            group="look",
            rare=True,
            summary="repeat a running job's next step on other ranks, to find a device that computes wrong numbers",
            arguments=Ref("titan_debug.cli.replay:arguments"),
            run=Ref("titan_debug.cli.replay:run"),
        ),
        Command(
            name="statistics",
            group="look",
            rare=True,
            summary="print a run's statistics of module outputs and gradients",
            arguments=Ref("titan_debug.cli.statistics:arguments"),
            run=Ref("titan_debug.cli.statistics:run"),
        ),
        Command(
            name="verify",
            group="look",
            summary="train a recipe on several meshes, and check that the losses agree",
            arguments=Ref("titan_debug.cli.verify:arguments"),
            run=Ref("titan_debug.cli.verify:run"),
            overrides=True,
        ),
        Command(
            name="certificate",
            group="look",
            rare=True,
            summary="compare a recipe, a run or weights with a certificate of `titan verify`",
            arguments=Ref("titan_debug.cli.certificate:arguments"),
            run=Ref("titan_debug.cli.certificate:run"),
            overrides=True,
        ),
        Command(
            name="trace summary",
            group="look",
            summary="show where the time of a profiled step went",
            arguments=Ref("titan_debug.cli.trace:arguments"),
            run=Ref("titan_debug.cli.trace:run"),
        ),
    ]
