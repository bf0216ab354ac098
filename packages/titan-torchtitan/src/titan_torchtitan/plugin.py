"""Components of titan-torchtitan."""

from __future__ import annotations

from titan_core.api import Command, Ref, hookimpl

api = (2, 0)


@hookimpl
def titan_commands() -> list[Command]:
    return [
        Command(
            name="config import",
            group="train",
            summary="write a recipe from one of TorchTitan's TOML recipes",
            arguments=Ref("titan_torchtitan.cli:arguments"),
            run=Ref("titan_torchtitan.cli:run"),
        ),
    ]
