"""Fixes for error messages: values that pass the check that has refused others. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from titan_core.api import Job, Problem
from titan_core.api.config.sections import DataSection, TrainingSection
from titan_core.toolkit.text import show

Option = Mapping[str, Any]
"""Config key -> value: what a user could set."""
MOST = 4
"""Values of a key that a fix lists."""


@dataclass(frozen=True)
class Refusal:
    """What a rule refuses about a job."""

    key: str
    why: str
    options: Iterable[Option] = ()
    """What may help, best first. Tried, so they may be rough."""
    otherwise: str = ""
    """The fix if nothing of that helps."""


Rule = Callable[[Job], Iterator[Refusal]]


def problems(job: Job, *rules: Rule) -> Iterator[Problem]:
    """Yield what ``rules`` refuse. Each fix names values with which the job has a mesh and a batch, and passes all rules; if
    there are none, values that pass the rule that refused."""
    for rule in rules:
        for one in rule(job):
            options = list(one.options) if job.fixes else []
            fix = _fix(job, rules, options) or _fix(job, (rule,), options) or one.otherwise
            yield job.config.problem(one.key, one.why, fix)


def _fix(job: Job, rules: Sequence[Rule], options: Iterable[Option]) -> str:
    found: dict[tuple[str, ...], list[Option]] = {}
    for option in options:
        listed, keys = found.get(tuple(option), []), tuple(option)
        most = MOST if len(keys) == 1 else 1
        if option not in listed and len(listed) < most and works(job, rules, option):
            found.setdefault(keys, []).append(option)
    words = []
    for keys, listed in found.items():
        first, *others = listed
        settings = " and ".join(f"{key} = {show(first[key])}" for key in keys)
        more = [show(option[keys[0]]) for option in others]
        words.append(f"set {', '.join([settings, *more[:-1]])}{f' or {more[-1]}' if more else ''}")
    return ", or ".join(words)


def works(job: Job, rules: Iterable[Rule], option: Option) -> bool:
    """Whether a job with ``option`` has a mesh and a batch, and passes ``rules``."""
    new = changed(job, option)
    return new is not None and all(next(rule(new), None) is None for rule in rules)


def changed(job: Job, option: Option) -> Job | None:
    """Return the job with other values on as many ranks; ``None`` if its degrees or its batch do not divide."""
    config, mesh = job.config.changed(option), job.mesh
    degrees = {**mesh.degrees, **{dim.name: option[dim.degree_key] for dim in mesh.dims if dim.degree_key in option}}
    rest = next((dim for dim in mesh.dims if dim.takes_rest and config.value(dim.degree_key) == -1), None)
    if degrees != mesh.degrees and rest is not None:
        degrees[rest.name] = mesh.world_size // math.prod(degrees[dim.name] for dim in mesh.dims if dim is not rest)
    view_degrees = {view.name: option.get(view.degree_key, mesh.view_degrees[view.name]) for view in mesh.views}
    new = replace(mesh, degrees=degrees, view_degrees=view_degrees)
    if new.world_size != mesh.world_size or any(new.borrowed(view) % new.view_degrees[view.name] for view in new.views):
        return None
    training, ranks = config.section(TrainingSection), new.batch_degree
    local = training.local_batch_size
    size = training.global_batch_size if training.global_batch_size > 0 else local * ranks
    shards = config.section(DataSection).logical_shards or size
    if size % (local * ranks) or shards % ranks or size % shards:
        return None
    batch = replace(
        job.batch, global_size=size, local_size=local, ranks=ranks, microbatches=size // (local * ranks),
        logical_shards=shards, seq_len=training.seq_len,
    )  # fmt: skip
    return replace(job, config=config, mesh=new, batch=batch)


def degrees_below(job: Job, key: str) -> list[Option]:
    """Return options with smaller degrees of the mesh dimension that ``key`` sets, largest first."""
    degree = next(job.mesh.degrees[dim.name] for dim in job.mesh.dims if dim.degree_key == key)
    return [{key: smaller} for smaller in reversed(divisors(job.mesh.world_size)) if smaller < degree]


def divisors(number: int) -> list[int]:
    """Return all divisors of ``number``."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]
