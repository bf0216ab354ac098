"""The components that titan-cluster contributes."""

from __future__ import annotations

from titan_core.api import Command, Ref, hookimpl

api = (1, 0)


@hookimpl
def titan_commands() -> list[Command]:
    return [
        Command(
            name="launch slurm",
            group="clusters",
            summary="write a job as an sbatch file for Slurm, or submit it",
            arguments=Ref("titan_cluster.slurm:arguments"),
            run=Ref("titan_cluster.slurm:run"),
            overrides=True,
        ),
        Command(
            name="launch kubernetes",
            group="clusters",
            summary="write a job as a JobSet for Kubernetes, or submit it",
            arguments=Ref("titan_cluster.kubernetes:arguments"),
            run=Ref("titan_cluster.kubernetes:run"),
            overrides=True,
        ),
        Command(
            name="launch skypilot",
            group="clusters",
            summary="write a job as a SkyPilot task for many clouds, or submit it",
            arguments=Ref("titan_cluster.skypilot:arguments"),
            run=Ref("titan_cluster.skypilot:run"),
            overrides=True,
        ),
    ]
