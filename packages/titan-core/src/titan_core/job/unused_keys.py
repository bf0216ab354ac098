"""Keys of ``[lr_scheduler]`` that the job's schedule does not read. Free of torch."""

from __future__ import annotations

from titan_core.api import Config, LRSchedule
from titan_core.plugins.registry import Components


def unused_keys(config: Config, registry: Components, chosen: LRSchedule) -> list[str]:
    """Return a note for each key of the section that ``config`` sets, and that only other schedules than ``chosen`` read."""
    key_of_name = LRSchedule.keys[0]
    notes = []
    read = (schedule.config for schedule in registry.all(LRSchedule))
    for cls in dict.fromkeys(cls for cls in read if cls is not None and cls is not chosen.config and cls in config.sections):
        for (field, value), (_, default) in zip(config.section(cls), cls(), strict=True):
            key = f"{cls.section}.{field}"
            if key != key_of_name and value != default:
                notes.append(f"{key} has no effect on a schedule with {key_of_name} = {chosen.name!r}")
    return notes
