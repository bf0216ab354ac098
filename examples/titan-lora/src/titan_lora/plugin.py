"""Registers low-rank adapters, and the command that writes them as peft reads them."""

from titan_core.api import Checks, Command, Phase, Ref, Transform, hookimpl
from titan_lora.config import LoRASection

api = (1, 0)


@hookimpl
def titan_precisions() -> list[Transform]:
    return [
        Transform(
            name="lora",
            summary="low-rank adapters beside frozen linear layers",
            config=LoRASection,
            phase=Phase.PRECISION,
            active=lambda context: context.section.rank > 0,
            checks=Checks(model=Ref("titan_lora.adapters:check")),
            apply=Ref("titan_lora.adapters:apply"),
            adds=("*.lora_A", "*.lora_B"),
        ),
    ]


@hookimpl
def titan_commands() -> list[Command]:
    return [
        Command(
            name="lora export",
            group="data and models",
            summary="write a run's adapters as peft reads them",
            arguments=Ref("titan_lora.export:arguments"),
            run=Ref("titan_lora.export:run"),
            overrides=True,
        ),
    ]
