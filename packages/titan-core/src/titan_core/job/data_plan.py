"""The datasets of a job, and how it reads them. Free of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

from titan_core.api import (
    BatchPlan,
    Config,
    Dataset,
    DatasetContext,
    Problem,
    TextTokenizer,
    Tokenizer,
    TokenizerContext,
    UserError,
)
from titan_core.api.config.sections import DataSection, MixtureEntry, ModelSection, TrainingSection, ValidationSection
from titan_core.api.data.dataset import DatasetSpec, FormatSpec, ReadPolicy, StreamSpec
from titan_core.api.data.tokenizer import TokenizerSpec
from titan_core.job.excluded import excluded_in
from titan_core.plugins.registry import Components
from titan_core.toolkit.record_format import format_of

MIXTURE, SETS = "data.mixture", "validation.sets"


def pick_datasets(
    config: Config, registry: Components, tokenizer: TextTokenizer | None, missing: list[Problem] | None = None
) -> tuple[DatasetSpec, ...]:
    """Return the training datasets. Each is checked as far as that is cheap.

    Args:
        missing: receives the problems of files that only this machine lacks; ``None`` raises them too.

    Raises:
        UserError: a dataset is invalid. Lists every problem found.
    """
    training, data = config.section(TrainingSection), config.section(DataSection)
    if data.mixture is None:
        entry = MixtureEntry(
            dataset=training.dataset, dataset_path=training.dataset_path, dataset_split=training.dataset_split
        )
        return (_pick(config, registry, entry, "training", tokenizer, missing),)
    problems: list[Problem] = []
    for key, noun in (("dataset_path", "path"), ("dataset_split", "split")):
        if getattr(training, key) is not None:
            why = f"conflicts with {MIXTURE}, in which each dataset has its own {noun}"
            problems.append(config.problem(f"training.{key}", why, f"remove it or {MIXTURE}"))
    if not any(entry.weight for entry in data.mixture):
        problems.append(config.problem(MIXTURE, "no dataset has a weight above 0", "set the weight of a dataset"))
    problems += _repeated(config, MIXTURE, (entry.name or entry.dataset for entry in data.mixture))
    specs = []
    for number, entry in enumerate(data.mixture):
        try:
            specs.append(_pick(config, registry, entry, f"{MIXTURE}[{number}]", tokenizer, missing))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return tuple(specs)


def pick_validation(
    config: Config, registry: Components, tokenizer: TextTokenizer | None, missing: list[Problem] | None = None
) -> tuple[DatasetSpec, ...]:
    """Return the validation datasets; none if validation is off.

    Args:
        missing: see :func:`pick_datasets`.

    Raises:
        UserError: a dataset is invalid. Lists every problem found.
    """
    section = config.section(ValidationSection)
    if not section.enable:
        return ()
    short = {key: vars(section)[key] for key in ("dataset", "dataset_path", "dataset_split", "text_field", "format")}
    if section.sets is None:
        if not section.dataset:
            raise UserError(config.problem("validation.dataset", "is required", "set it to the dataset to validate on"))
        entry = MixtureEntry(**short)
        return (_pick(config, registry, entry, "validation", tokenizer, missing, "validation"),)
    problems = [
        config.problem(f"validation.{key}", f"conflicts with {SETS}, in which each set has its own", f"remove it or {SETS}")
        for key, value in short.items()
        if value
    ]
    problems += _repeated(config, SETS, (entry.name for entry in section.sets))
    specs = []
    for number, one in enumerate(section.sets):
        try:
            entry = MixtureEntry(**vars(one))
            specs.append(_pick(config, registry, entry, f"{SETS}[{number}]", tokenizer, missing, "validation"))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return tuple(specs)


def _repeated(config: Config, key: str, names: Iterable[str]) -> list[Problem]:
    """Return a problem for each name that several datasets have."""
    return [
        config.problem(key, f"two datasets are named {name!r}", "give each a different name")
        for name, count in Counter(names).items()
        if count > 1
    ]


def plan_stream(config: Config, tokenizer: Tokenizer, batch: BatchPlan, datasets: tuple[DatasetSpec, ...]) -> StreamSpec:
    """Return the spec by which ``datasets`` become sequences."""
    data = config.section(DataSection)
    return StreamSpec(
        datasets,
        tokenizer.build,
        tokenizer_context(config, tokenizer),
        batch,
        config.section(TrainingSection).seed,
        data.on_end,
        ReadPolicy(data.on_corrupt, data.retries, data.retry_seconds),
        data.shuffle,
        data.shuffle_buffer,
        data.packing_window if data.packing == "best_fit" else 0,
        excluded_in(config),
    )


def tokenizer_context(config: Config, tokenizer: Tokenizer) -> TokenizerContext[Any]:
    """Return the context that ``tokenizer`` is built with."""
    return TokenizerContext(section=tokenizer.section_in(config), path=config.section(ModelSection).tokenizer_path)


def _format(config: Config, registry: Components, entry: MixtureEntry, table: str) -> FormatSpec | None:
    """
    Raises:
        UserError: the format does not exist.
    """
    if entry.format is not None:
        return format_of(config, registry, f"{table}.format", entry.format)
    return None if entry.text_field else format_of(config, registry, "data.format", config.section(DataSection).format)


def _pick(
    config: Config,
    registry: Components,
    entry: MixtureEntry,
    table: str,
    tokenizer: TextTokenizer | None,
    missing: list[Problem] | None,
    default_split: Literal["train", "validation"] = "train",
) -> DatasetSpec:
    """Return the spec of the dataset that ``entry`` names; ``table`` is its place in the config."""
    data = config.section(DataSection)
    if entry.dataset not in registry.names(Dataset):
        fix = registry.suggest(Dataset, entry.dataset)
        raise UserError.one(config.where(f"{table}.dataset", entry.dataset), registry.unknown(Dataset), fix)
    dataset = registry.get(Dataset, entry.dataset)
    if entry.dataset_split is not None and not dataset.splits:
        where = config.where(f"{table}.dataset_split", entry.dataset_split)
        raise UserError.one(where, f"dataset {entry.dataset!r} has no splits", "remove it")
    context: DatasetContext[Any] = DatasetContext(
        section=dataset.section_in(config),
        name=entry.dataset,
        path=entry.dataset_path,
        text_field=entry.text_field or data.text_field,
        seed=config.section(TrainingSection).seed,
        where=config.where(f"{table}.dataset_path", entry.dataset_path),
        split_key=f"{table}.dataset_split",
        split=entry.dataset_split,
        default_split=default_split,
        format=_format(config, registry, entry, table),
        skip_corrupt=data.on_corrupt == "skip",
        max_record_bytes=data.max_record_bytes,
        tokenizer=tokenizer.fingerprint() if tokenizer is not None and dataset.holds_tokens else "",
        vocab_size=tokenizer.vocab_size if tokenizer is not None and dataset.holds_tokens else None,
        shuffle=data.shuffle,
    )
    if dataset.tokenizes and not data.document_mask:
        why = f"dataset {entry.dataset!r} puts several documents into a sequence, which must not attend to each other"
        raise UserError(config.problem("data.document_mask", why, "set data.document_mask = true"))
    if dataset.tokenizes and tokenizer is None:  # assembly reports its mistake
        return DatasetSpec(entry.name or entry.dataset, entry.weight, dataset.build, context)
    if dataset.tokenizes:
        component = registry.get(Tokenizer, config.section(ModelSection).tokenizer)
        spec = TokenizerSpec(component.build, tokenizer_context(config, component))
        context = replace(context, tokenizer_spec=spec, seq_len=config.section(TrainingSection).seq_len)
    problems = list(dataset.check.load()(context)) if dataset.check is not None else []
    if missing is not None:
        missing += [problem for problem in problems if problem.missing]
        problems = [problem for problem in problems if not problem.missing]
    if problems:
        raise UserError(*problems)
    extras = {} if dataset.extras is None else dict(dataset.extras.load()(context))
    return DatasetSpec(entry.name or entry.dataset, entry.weight, dataset.build, context, extras)
