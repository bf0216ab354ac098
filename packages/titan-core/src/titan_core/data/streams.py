"""All that decides a stream of sequences, in a form that travels to other processes. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from titan_core.api.checkpoint import RefusedChange
from titan_core.api.dataset import DocumentSource, StreamSpec
from titan_core.api.errors import Problem, UserError
from titan_core.api.tokenizer import fingerprint
from titan_core.api.tools.patterns import matches
from titan_core.api.tools.secrets import text_without_secrets

if TYPE_CHECKING:
    from titan_core.api.tokenizer import TextTokenizer


def stream_identity(spec: StreamSpec, sources: Sequence[DocumentSource], tokenizer: TextTokenizer) -> dict[str, Any]:
    """What a position in this stream means something in alone, by the names under which changes of it are allowed."""
    identity: dict[str, Any] = {
        "data.logical_shards": spec.plan.logical_shards,
        "datasets": [one.context.name for one in spec.datasets],
        "model.tokenizer": fingerprint(tokenizer),
        "training.seed": spec.seed,
        "data.shuffle_buffer": spec.shuffle_buffer,
    }
    for number, (one, source) in enumerate(zip(spec.datasets, sources, strict=True)):
        found = getattr(source, "fingerprint", None)  # a stream has none, nor may a third party's source
        content = dict(found) if found is not None else None
        identity |= {
            # Where the content is known, it may be in another place.
            f"dataset.{number}.path": None if content else text_without_secrets(one.context.path or ""),
            f"dataset.{number}.weight": one.weight,
            f"dataset.{number}.split": one.context.split,
            f"dataset.{number}.text_field": None if one.context.format else one.context.text_field,
            f"dataset.{number}.format": one.context.format,
            f"dataset.{number}.documents": source.num_documents,
            f"dataset.{number}.content": content,
        }
    return identity


def stream_changes(
    spec: StreamSpec, before: Mapping[str, Any], now: Mapping[str, Any], allowed: Sequence[str]
) -> tuple[list[RefusedChange], list[str]]:
    """What differs between two :func:`stream_identity`.

    Args:
        allowed: patterns of what may differ: ``dataset.NAME.content`` and the like, or a config's key. What divides the
            positions may not.

    Returns:
        What is not allowed, and what is.
    """
    refused, accepted = [], []
    for key, value in now.items():
        if (old := before.get(key)) == value:
            continue
        _, number, aspect = key.split(".", 2) if key.startswith("dataset.") else ("", "", "")
        name = f"dataset.{spec.datasets[int(number)].name}.{aspect}" if number else key
        fixed = key in ("data.logical_shards", "datasets")
        if not fixed and matches(name, allowed):
            accepted.append(f"{name}: {old!r} -> {value!r}")
            continue
        where = f"dataset {spec.datasets[int(number)].name!r}: its {aspect}" if number else key
        if aspect == "content" and isinstance(old, Mapping) and isinstance(value, Mapping):
            differs = [part for part in ("files", "bytes", "sample") if old.get(part) != value.get(part)]
            what = ", ".join(f"{part} {old.get(part)} -> {value.get(part)}" for part in differs)
            why = f"it is not the data that the run was trained on ({what}), and the saved position means nothing in it"
        else:
            where = f"{where} = {value!r}"
            why = f"the saved position in the data was made with {old!r}, and means nothing here"
        problem = Problem(where, why, "set it as it was, or start over")
        refused.append(RefusedChange(name, problem, allowable=not fixed))
    return refused, accepted


def open_sources(spec: StreamSpec) -> list[DocumentSource]:
    """Every dataset, opened.

    Raises:
        UserError: one that cannot be, or that has no document for each logical shard.
    """
    sources = [one.build.load()(one.context) for one in spec.datasets]
    shards = spec.plan.logical_shards
    problems = [
        Problem(
            f"dataset {one.name!r}",
            f"it has {source.num_documents} documents, fewer than the {shards} streams that they are divided into",
            "lower data.logical_shards (or training.global_batch_size), or give more documents",
        )
        for one, source in zip(spec.datasets, sources, strict=True)
        if source.num_documents is not None and source.num_documents < shards and one.weight and spec.on_end != "once"
    ]
    if problems:
        raise UserError(*problems)
    return sources
