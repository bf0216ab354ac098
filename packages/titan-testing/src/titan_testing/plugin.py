"""The components that titan-testing contributes: its commands, and the model on which the suites try parallelisms."""

from __future__ import annotations

from titan_core.api import Command, Model, Recipe, Ref, hookimpl, recipes_in
from titan_testing.tiny_args import TinyArgs

api = (1, 0)


@hookimpl
def titan_models() -> list[Model]:
    return [
        Model(
            name="tiny",
            summary="a small decoder, for tests",
            flavors={"debug": TinyArgs()},
            define=Ref("titan_testing.tiny:define"),
            default=False,
        )
    ]


@hookimpl
def titan_recipes() -> list[Recipe]:
    return recipes_in("titan_testing")


@hookimpl
def titan_commands() -> list[Command]:
    return [
        Command(
            name="plugin new",
            group="plugins",
            summary="write a plugin that works at once, with its tests",
            arguments=Ref("titan_testing.cli.new:arguments"),
            run=Ref("titan_testing.cli.new:run"),
        ),
        Command(
            name="plugin check",
            group="plugins",
            summary="try a plugin's components on this machine, and name what is wrong",
            arguments=Ref("titan_testing.cli.check:arguments"),
            run=Ref("titan_testing.cli.check:run"),
        ),
    ]
