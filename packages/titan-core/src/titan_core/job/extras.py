"""Checks that the extra tensors that a job's model and objective need are filled. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from titan_core.api import Config, ModelDefinition, Objective, Problem, Transform
from titan_core.api.data.dataset import DatasetSpec


def check_extras(
    config: Config,
    streams: Mapping[str, Sequence[DatasetSpec]],
    model: ModelDefinition,
    objective: Objective | None,
    transforms: Sequence[Transform],
) -> Iterator[Problem]:
    """Yield what is wrong with the extra tensors of the job's batches.

    Args:
        streams: datasets that are mixed, by the config key that selects them.
    """
    added = {name for transform in transforms for name in transform.extras}
    needed = dict.fromkeys(model.layout.inputs, "the model")
    if objective is not None:
        needed |= dict.fromkeys(objective.extras, f"objective {objective.name!r}")
    for key, datasets in streams.items():
        for name, who in needed.items():
            if name not in added and not any(name in dataset.extras for dataset in datasets):
                why = f"{who} needs the extra tensor {name!r}, which no dataset fills"
                yield config.problem(key, why, "choose a dataset that fills it, or another objective or model")
        yield from _mixed(config, key, datasets)


def _mixed(config: Config, key: str, datasets: Sequence[DatasetSpec]) -> Iterator[Problem]:
    """Yield what contradicts between the datasets of a mixture."""
    for name in sorted({name for dataset in datasets for name in dataset.extras}):
        having = [dataset for dataset in datasets if name in dataset.extras]
        field = having[0].extras[name]
        for other in having[1:]:
            if other.extras[name] != field:
                why = f"datasets {having[0].name!r} and {other.name!r} fill the extra tensor {name!r} in different forms"
                yield config.problem(key, f"{why}: {field} and {other.extras[name]}", "mix datasets with the same form")
        lacking = [dataset.name for dataset in datasets if name not in dataset.extras and dataset.weight]
        if lacking and field.fill is None:
            why = f"dataset {lacking[0]!r} does not fill the extra tensor {name!r} of dataset {having[0].name!r}, which has "
            yield config.problem(key, f"{why}no fill value", "mix only datasets that fill it")
