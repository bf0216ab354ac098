"""Components of titan-inference."""

from __future__ import annotations

from titan_core.api.command import Command
from titan_core.api.hookspecs import hookimpl
from titan_core.api.ref import Ref

api = (1, 0)


@hookimpl
def titan_commands() -> list[Command]:
    return [
        Command(
            name="generate",
            summary="continue prompts with a trained model",
            arguments=Ref("titan_inference.cli:arguments"),
            run=Ref("titan_inference.cli:run"),
            overrides=True,
            launches=True,
        ),
        Command(
            name="eval",
            summary="measure a trained model: perplexity on a dataset, tasks of lm-eval",
            arguments=Ref("titan_inference.evaluate:arguments"),
            run=Ref("titan_inference.evaluate:run"),
            overrides=True,
            launches=True,
        ),
    ]
