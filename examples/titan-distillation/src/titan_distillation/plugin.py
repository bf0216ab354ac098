"""Registers the objective ``distillation``."""

from collections.abc import Iterable, Mapping
from typing import Any

from titan_core.api import JobContext, Objective, Problem, Ref, hookimpl
from titan_distillation.config import DistillationSection

api = (1, 0)


@hookimpl
def titan_objectives() -> list[Objective]:
    return [
        Objective(
            name="distillation",
            summary="divergence from a frozen teacher, and cross entropy of the next token",
            config=DistillationSection,
            build=Ref("titan_distillation.objective:Distillation"),
            check=Ref("titan_distillation.plugin:check"),
            reference=Ref("titan_distillation.plugin:teacher"),
        )
    ]


def teacher(context: JobContext[DistillationSection]) -> Mapping[str, Any]:
    return {"model.from_pretrained": context.section.teacher}


def check(context: JobContext[DistillationSection]) -> Iterable[Problem]:
    if context.section.teacher is None:
        yield context.config.problem("distillation.teacher", "is required", "set it to the path of the teacher's weights")
