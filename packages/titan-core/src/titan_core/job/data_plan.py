"""The datasets of a job, how it reads them, what it passes over, and the extra tensors they fill. Free of torch."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from titan_core.api import (
    BatchPlan,
    Config,
    Dataset,
    DatasetContext,
    ExtraField,
    ModelDefinition,
    Objective,
    Problem,
    RecordFormat,
    Registry,
    TextTokenizer,
    Tokenizer,
    TokenizerContext,
    Transform,
    UserError,
)
from titan_core.api.config.sections import (
    DataSection,
    JobSection,
    MixtureEntry,
    ModelSection,
    TrainingSection,
    ValidationSection,
)
from titan_core.api.data.dataset import DatasetSpec, FormatSpec, ReadPolicy, StreamSpec
from titan_core.api.data.tokenizer import TokenizerSpec
from titan_core.api.plugins.errors import shown
from titan_core.plugins.registry import Components
from titan_core.toolkit.json_lines import records_of
from titan_core.toolkit.runs.files import EXCLUDED

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
    problems = dataset.check.call_list(Problem, context) if dataset.check is not None else []
    if missing is not None:
        missing += [problem for problem in problems if problem.missing]
        problems = [problem for problem in problems if not problem.missing]
    if problems:
        raise UserError(*problems)
    extras: dict[str, ExtraField] = {} if dataset.extras is None else dict(dataset.extras.call(Mapping, context))
    names = all(isinstance(name, str) and name.isidentifier() for name in extras)
    if dataset.extras is not None and not (names and all(isinstance(one, ExtraField) for one in extras.values())):
        raise dataset.extras.wrong(f"returned {shown(extras)}; it must map names to ExtraFields")
    return DatasetSpec(entry.name or entry.dataset, entry.weight, dataset.build, context, extras)


def excluded_in(config: Config) -> dict[str, frozenset[int]]:
    """Return the indices of the documents to pass over, by dataset.

    Raises:
        UserError: the file does not exist, cannot be read, or has another line than one such as ``{"dataset": "web",
            "index": 3}``.
    """
    key, given = "data.exclude", config.section(DataSection).exclude
    path = Path(config.section(JobSection).dump_folder) / EXCLUDED if given is None else Path(given)
    if not path.is_file():
        if given is None:
            return {}
        raise UserError(config.problem(key, "no such file", "fix the path, or remove the key"))
    found: defaultdict[str, set[int]] = defaultdict(set)
    try:
        for number, record in records_of(path):
            dataset, index = record.get("dataset"), record.get("index")
            if not isinstance(dataset, str) or not isinstance(index, int) or isinstance(index, bool) or index < 0:
                fix = 'write {"dataset": NAME, "index": N} in each line, as `titan data step RUN N --json` prints them'
                raise UserError.one(f"{path}:{number}", "names no document", fix)
            found[dataset].add(index)
    except OSError as error:
        raise UserError.one(str(path), f"cannot be read: {error.strerror or error}", "fix the file") from None
    return {dataset: frozenset(indices) for dataset, indices in sorted(found.items())}


_CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""``module:function``, which older versions of Titan imported and called."""
_TEMPLATE = 'a template of fields looks like "{{ question }} {{ answer }}"'


def format_of(config: Config, registry: Registry, key: str, text: str | None) -> FormatSpec | None:
    """Return what the value ``text`` of ``key`` stands for; ``None`` for no format. Whether a template is valid is for the
    dataset to check.

    Raises:
        UserError: ``text`` is neither a template nor the name of a registered format.
    """
    if text is None:
        return None
    if any(mark in text for mark in ("{{", "{%")):
        return FormatSpec(text, key)
    if text not in registry.names(RecordFormat) and _CODE.fullmatch(text):
        why = "names code, and a recipe runs none but that of plugins"
        fix = "register the function as a format in a file, and start `titan --plugin FILE ...`; or "
        raise UserError.one(config.where(key, text), why, fix + _TEMPLATE)
    try:
        return FormatSpec(text, key, registry.get(RecordFormat, text).convert)
    except UserError as error:
        problem = error.problems[0]
        raise UserError.one(config.where(key, text), problem.why, f"{problem.fix}; {_TEMPLATE}") from None


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
