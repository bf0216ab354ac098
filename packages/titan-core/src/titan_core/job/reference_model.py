"""The job of a model that is not trained, with which an objective compares the trained one. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from titan_core.api import Config, Problem, UserError
from titan_core.api.config.sections import ModelSection
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.api.plugins.job import Job
from titan_core.config.load import raw_of, resolve
from titan_core.config.overrides import TypedOverride
from titan_core.plugins.registry import Components

_KEPT = ("tokenizer", "tokenizer_path")
"""Keys of ``[model]`` that both models share. The others describe the trained model only."""


def reference_config(config: Config, changes: Mapping[str, Any], registry: Components) -> Config:
    """Return the config of the reference model: that of the job with ``changes``. Any of them replaces the trained model.

    Raises:
        UserError: the changes are invalid.
    """
    if changes:
        raw = raw_of(config)
        own = {key: value for key, value in raw.tables[ModelSection.section].items() if key in _KEPT}
        raw = replace(raw, tables={**raw.tables, ModelSection.section: own})
        config = resolve(raw, [TypedOverride(key, value) for key, value in changes.items()], registry)
    # Patterns match parameters of the trained model.
    return config.changed({"optimizer.param_groups": None, "training.freeze": []})


def require_reference(job: AssembledJob, reference: AssembledJob) -> AssembledJob:
    """Return ``job`` with its ``reference`` model.

    Raises:
        UserError: a transform of the job refuses the reference model, or the vocabularies differ.
    """
    problems: list[Problem] = []
    where, fix = f"the reference model of objective {job.objective.name!r}", "choose another model"
    mine, theirs = job.model.layout, reference.model.layout
    if mine.vocab_size != theirs.vocab_size:
        why = f"has a vocabulary of {theirs.vocab_size:,} tokens, and the trained model one of {mine.vocab_size:,}"
        problems.append(Problem(where, why, fix))
    if job.batch.seq_len > theirs.max_seq_len:
        why = f"accepts at most {theirs.max_seq_len:,} tokens, and training.seq_len is {job.batch.seq_len:,}"
        problems.append(Problem(where, why, fix))
    of_model = Job(reference.config, reference.mesh, reference.batch, reference.model, reference.trains)
    for transform in job.transforms:
        if transform.check is not None:
            found = transform.check.call_list(Problem, transform.context(of_model))
            problems += [replace(problem, where=f"{where}: {problem.where}") for problem in found]
    if problems:
        raise UserError(*problems)
    return replace(job, reference=reference)
