"""Identity of a stream of sequences, and opening of its sources. Free of torch."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titan_core.api import DocumentSource, Problem, RefusedChange, TextTokenizer, UserError, matches
from titan_core.api.config.secrets import redact_text
from titan_core.api.data.dataset import DatasetSpec, StreamSpec
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.api.plugins.errors import shown

log = logging.getLogger(__name__)

MIXTURE, SHARDS = "data.mixture", "data.logical_shards"
_DOCUMENTS_OF = ("dataset", "split", "text_field", "format", "documents", "content", "order")
"""Aspects of a dataset of which a change changes its documents or their order."""


@dataclass(frozen=True)
class AcceptedChange:
    """A difference that the config allows."""

    dataset: int | None
    """Number of the dataset that it concerns; ``None``: all."""
    aspect: str
    """Of the dataset, or the config key."""
    text: str


def stream_identity(spec: StreamSpec, sources: Sequence[DocumentSource], tokenizer: TextTokenizer) -> dict[str, Any]:
    """Return the properties that a position in this stream depends on, by the names under which changes can be allowed."""
    identity: dict[str, Any] = {
        SHARDS: spec.plan.logical_shards,
        "names": [dataset.name for dataset in spec.datasets],
        "datasets": [dataset.context.name for dataset in spec.datasets],
        "model.tokenizer": tokenizer.fingerprint(),
        "training.seed": spec.seed,
        "data.shuffle_buffer": spec.shuffle_buffer,
        # None, as in the positions of versions that always concatenated.
        "data.packing": f"best_fit, {spec.packing_window} documents" if spec.packing_window else None,
    }
    for number, (dataset, source) in enumerate(zip(spec.datasets, sources, strict=True)):
        found = getattr(source, "fingerprint", None)  # streams have none, and third-party sources may have none
        content = dict(found) if found is not None else None
        identity |= {
            # Known content may move to another path.
            f"dataset.{number}.path": None if content else redact_text(dataset.context.path or ""),
            f"dataset.{number}.weight": dataset.weight,
            f"dataset.{number}.split": dataset.context.split,
            f"dataset.{number}.text_field": None if dataset.context.format else dataset.context.text_field,
            f"dataset.{number}.format": dataset.context.format.text if dataset.context.format else None,
            f"dataset.{number}.documents": source.num_documents,
            f"dataset.{number}.content": content,
            f"dataset.{number}.order": getattr(source, "order", None),
            f"dataset.{number}.excluded": sorted(spec.excluded.get(dataset.name, ())) or None,
        }
    return identity


def stream_changes(
    spec: StreamSpec, before: Mapping[str, Any], now: Mapping[str, Any], allowed: Sequence[str]
) -> tuple[list[RefusedChange], list[AcceptedChange]]:
    """Compare two results of :func:`stream_identity`: what both have, and each dataset that both have, by its name.

    Args:
        allowed: patterns of accepted differences, such as ``dataset.NAME.content`` or a config key. A difference in
            ``data.logical_shards`` is never accepted.

    Returns:
        The refused and the accepted changes.
    """
    refused, accepted = [], []
    names = names_in(before, now)
    old_values, new_values = _by_name(before, names), _by_name(now, now["names"])
    numbers = {dataset.name: number for number, dataset in enumerate(spec.datasets)}
    for key, value in new_values.items():
        if (old := old_values.get(key)) == value:
            continue
        dataset, aspect = key if isinstance(key, tuple) else ("", "")
        if dataset and dataset not in names:
            continue  # the list of datasets differs
        name = f"dataset.{dataset}.{aspect}" if dataset else str(key)
        if aspect == "excluded" and set(old or ()) < set(value or ()):
            text = f"{name}: {len(value) - len(old or ())} documents more are passed over"
            accepted.append(AcceptedChange(numbers[dataset], aspect, text))
            continue
        fixed = key == SHARDS
        if not fixed and matches(name, allowed):
            number = numbers[dataset] if dataset else None
            accepted.append(AcceptedChange(number, aspect or name, f"{name}: {old!r} -> {value!r}"))
            continue
        where = f"dataset {dataset!r}: its {aspect}" if dataset else str(key)
        if aspect == "content" and isinstance(old, Mapping) and isinstance(value, Mapping):
            differs = [part for part in ("files", "bytes", "sample") if old.get(part) != value.get(part)]
            changes = ", ".join(f"{part} {old.get(part)} -> {value.get(part)}" for part in differs)
            why = f"differs from the data that the run was trained on ({changes}), so the saved position is meaningless"
        elif aspect == "excluded":
            why = (
                f"{len(set(old or ()) - set(value or ())):,} documents were passed over, and are not any more (data.exclude)"
            )
        elif aspect == "order":
            where = f"{where} = {value!r}"
            why = (
                f"the position in the data was saved in another order ({old or 'one of an older version of Titan'}), in "
                "which it means other documents: some would be read twice in this epoch, and others not at all"
            )
        else:
            where = f"{where} = {value!r}"
            why = f"was {old!r} when the position in the data was saved"
            why += "" if key == MIXTURE or aspect == "weight" else ", so the position is meaningless"
        fix = "restore the old value"
        if aspect == "order":
            fix = (
                "restore data.shuffle"
                if old and spec.shuffle not in old
                else "resume with the version of Titan that saved it"
            )
        problem = Problem(where, why, f"{fix}, or start a new run")
        refused.append(RefusedChange(name, problem, allowable=not fixed))
    return refused, accepted


def names_in(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names of the datasets in ``before``. Versions whose datasets could not change did not write them."""
    names: list[str] = before.get("names", now["names"] if before["datasets"] == now["datasets"] else before["datasets"])
    return names


def _by_name(identity: Mapping[str, Any], names: Sequence[str]) -> dict[str | tuple[str, str], Any]:
    """Return the values of an identity; those of a dataset by its name and the aspect."""
    found: dict[str | tuple[str, str], Any] = {MIXTURE: list(names)}
    found |= {(name, "dataset"): kind for name, kind in zip(names, identity["datasets"], strict=True)}
    for key, value in identity.items():
        if key.startswith("dataset."):
            _, number, aspect = key.split(".", 2)
            found[names[int(number)], aspect] = value
        elif key not in ("names", "datasets"):
            found[key] = value
    return found


def changed_documents(spec: StreamSpec, accepted: Sequence[AcceptedChange], allowed: Sequence[str]) -> set[int]:
    """Return the numbers of the datasets that may have other documents, tokens or orders than when a position was saved.

    Args:
        accepted: the second result of :func:`stream_changes`.
        allowed: its argument. ``dataset.NAME.content`` allows other documents in a dataset without a fingerprint too.
    """
    numbers = range(len(spec.datasets))
    if any(change.dataset is None and change.aspect != MIXTURE for change in accepted):
        return set(numbers)
    named = {number for number in numbers if matches(f"dataset.{spec.datasets[number].name}.content", allowed)}
    return named | {change.dataset for change in accepted if change.dataset is not None and change.aspect in _DOCUMENTS_OF}


@dataclass(frozen=True)
class OpenedData:
    """The opened sources, in the order of the job's datasets."""

    training: Sequence[DocumentSource]
    validation: Sequence[DocumentSource] = ()

    @classmethod
    def of(cls, job: AssembledJob) -> OpenedData:
        """Open all datasets of ``job``.

        Raises:
            UserError: a dataset cannot be opened.
        """
        for line in job.text_tokenizer.describe_special_tokens():
            log.info("tokenizer %s: %s", job.tokenizer.name, line)
        return cls(open_sources(job.data), open_sources(job.validation) if job.validation is not None else ())


def _opened(dataset: DatasetSpec) -> DocumentSource:
    source = dataset.build.call(DocumentSource, dataset.context)
    number: Any = source.num_documents
    if number is not None and not (isinstance(number, int) and number >= 0):
        raise dataset.build.wrong(f"returned a source of {shown(number)} documents; it must be a whole number or None")
    return source


def open_sources(spec: StreamSpec) -> list[DocumentSource]:
    """Open every dataset of ``spec``.

    Raises:
        UserError: a dataset cannot be opened, has fewer documents than logical shards, or does not have the order of
            ``data.shuffle``.
    """
    sources = [_opened(dataset) for dataset in spec.datasets]
    shards = spec.plan.logical_shards
    problems = [
        Problem(
            f"dataset {dataset.name!r}",
            f"has {source.num_documents} documents, fewer than the {shards} logical shards",
            "lower data.logical_shards (or training.global_batch_size), or add documents",
        )
        for dataset, source in zip(spec.datasets, sources, strict=True)
        if source.num_documents is not None and source.num_documents < shards and dataset.weight and spec.on_end != "once"
    ]
    problems += [
        Problem(
            f"data.shuffle = {spec.shuffle!r}",
            f"dataset {dataset.name!r} has no such order"
            + (": it is a stream" if source.num_documents is None else " (its plugin does not use DatasetContext.shuffle)"),
            "remove it" + (", or set data.shuffle_buffer" if source.num_documents is None else ""),
        )
        for dataset, source in zip(spec.datasets, sources, strict=True)
        if spec.shuffle != "documents" and f"{spec.shuffle}, version" not in (getattr(source, "order", None) or "")
    ]
    problems += _excluding_problems(zip(spec.datasets, sources, strict=True), spec.excluded)
    if problems:
        raise UserError(*problems)
    return sources


def _excluding_problems(
    datasets: Iterable[tuple[DatasetSpec, DocumentSource]], excluded: Mapping[str, frozenset[int]]
) -> list[Problem]:
    """Return the reasons why documents cannot be passed over."""
    problems = []
    for dataset, source in datasets:
        indices = excluded.get(dataset.name)
        if not indices:
            continue
        where = f"data.exclude: dataset {dataset.name!r}"
        if source.num_documents is None:
            why = "is a stream, whose documents have no index"
            problems.append(Problem(where, why, "use local files, or remove its lines"))
        elif max(indices) >= source.num_documents:
            why = f"has {source.num_documents:,} documents, and none of index {max(indices):,}"
            problems.append(Problem(where, why, "name documents as `titan data step RUN N --json` prints them"))
        elif not hasattr(source.shard(0, 1, 0), "place"):
            why = "its plugin does not say which documents it returns (DocumentShard.place)"
            problems.append(Problem(where, why, "remove its lines"))
    return problems
