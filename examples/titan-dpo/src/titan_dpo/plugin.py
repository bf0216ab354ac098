"""Registers the objective ``dpo`` and the dataset ``preferences``."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from titan_core.api import Dataset, DatasetContext, ExtraField, JobContext, Objective, Problem, Ref, hookimpl
from titan_dpo.config import DPOSection

api = (1, 0)


@hookimpl
def titan_objectives() -> list[Objective]:
    return [
        Objective(
            name="dpo",
            summary="direct preference optimization against the model that the run starts from",
            config=DPOSection,
            build=Ref("titan_dpo.objective:DPO"),
            extras=("preference",),
            reference=Ref("titan_dpo.plugin:reference"),
        )
    ]


@hookimpl
def titan_datasets() -> list[Dataset]:
    return [
        Dataset(
            name="preferences",
            summary="JSON lines with prompt, chosen and rejected",
            build=Ref("titan_dpo.preferences:build"),
            check=Ref("titan_dpo.plugin:check"),
            tokenizes=True,
            extras=Ref("titan_dpo.plugin:extras"),
        )
    ]


def reference(context: JobContext[DPOSection]) -> Mapping[str, Any]:
    """Return how the reference policy differs from the model that the run starts from: not at all."""
    return {}


def extras(context: DatasetContext[None]) -> Mapping[str, ExtraField]:
    return {"preference": ExtraField("int8", fill=0)}


def check(context: DatasetContext[None]) -> Iterable[Problem]:
    if context.path is None or not Path(context.path).is_file():
        yield Problem(context.where, "is not a file", "set it to a file with a JSON object on each line", missing=True)
