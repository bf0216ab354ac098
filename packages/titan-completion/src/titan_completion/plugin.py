"""The components that titan-completion contributes."""

from __future__ import annotations

from titan_core.api import Command, Ref, hookimpl

api = (1, 0)


@hookimpl
def titan_commands() -> list[Command]:
    return [
        Command(
            name="completion",
            group="plugins",
            summary="print a script that completes titan's arguments in a shell",
            arguments=Ref("titan_completion.cli:arguments"),
            run=Ref("titan_completion.cli:completion"),
        ),
        Command(
            name="config schema",
            group="train",
            summary="print the JSON Schema of a recipe",
            run=Ref("titan_completion.cli:schema"),
        ),
        Command(
            name="recipe copy",
            group="train",
            summary="write a recipe to a file, with comments, to edit it",
            arguments=Ref("titan_completion.cli:copy_arguments"),
            run=Ref("titan_completion.cli:copy"),
        ),
    ]
