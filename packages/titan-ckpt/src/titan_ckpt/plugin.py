"""Checkpoint component and commands of titan-ckpt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan_ckpt.config import CheckpointSection
from titan_core.api import Checkpoint, Command, Ref, hookimpl

if TYPE_CHECKING:
    from titan_core.api import RunEnd
    from titan_core.api.observe.events import NextCommand
    from titan_core.api.plugins.assembled_job import AssembledJob

api = (1, 0)


@hookimpl
def titan_checkpoints() -> list[Checkpoint]:
    return [
        Checkpoint(
            name="distributed",
            summary="sharded checkpoints: atomic, verified, loadable on any mesh",
            config=CheckpointSection,
            active=lambda context: context.section.enable,
            build=Ref("titan_ckpt.store:Store"),
            check=Ref("titan_ckpt.config:check"),
            find_model=Ref("titan_ckpt.stored_model:find"),
            describe_model=Ref("titan_ckpt.described_model:describe"),
            set_aside=Ref("titan_ckpt.save.retention:set_aside"),
            resumes_after=Ref("titan_ckpt.resume.position:resumes_after"),
            find_position=Ref("titan_ckpt.resume.position:find_position"),
        )
    ]


@hookimpl
def titan_commands() -> list[Command]:
    return [
        Command(
            name="checkpoint list",
            group="data and models",
            summary="list the checkpoints of a run",
            arguments=Ref("titan_ckpt.commands.cli:list_arguments"),
            run=Ref("titan_ckpt.commands.cli:list_checkpoints"),
        ),
        Command(
            name="checkpoint show",
            group="data and models",
            summary="show the contents of a checkpoint",
            arguments=Ref("titan_ckpt.commands.cli:show_arguments"),
            run=Ref("titan_ckpt.commands.cli:show"),
        ),
        Command(
            name="checkpoint verify",
            group="data and models",
            summary="verify every byte of checkpoints by checksum",
            arguments=Ref("titan_ckpt.commands.cli:verify_arguments"),
            run=Ref("titan_ckpt.commands.cli:verify"),
        ),
        Command(
            name="checkpoint convert",
            group="data and models",
            summary="convert to Hugging Face or DCP format, or from Hugging Face, Meta or DCP (TorchTitan) format",
            overrides=True,
            arguments=Ref("titan_ckpt.commands.cli:convert_arguments"),
            run=Ref("titan_ckpt.foreign.convert:run"),
        ),
        Command(
            name="checkpoint merge",
            group="data and models",
            summary="average the weights of checkpoints, or extract the averages that a run has kept",
            arguments=Ref("titan_ckpt.commands.cli:merge_arguments"),
            run=Ref("titan_ckpt.commands.merge:run"),
        ),
        Command(
            name="checkpoint rm",
            group="data and models",
            summary="remove checkpoints",
            arguments=Ref("titan_ckpt.commands.cli:rm_arguments"),
            run=Ref("titan_ckpt.commands.cli:rm"),
        ),
        Command(
            name="run branch",
            group="train",
            summary="start a run of its own from a checkpoint of another run, with other settings",
            overrides=True,
            arguments=Ref("titan_ckpt.commands.branch:arguments"),
            run=Ref("titan_ckpt.commands.branch:run"),
        ),
    ]


@hookimpl(trylast=True)
def titan_next_commands(job: AssembledJob, end: RunEnd, command: tuple[str, ...] | None) -> list[NextCommand]:
    from titan_ckpt.resume.position import resume_commands

    return resume_commands(job, end, command)
