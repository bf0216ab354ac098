"""All that decides a stream of sequences, in a form that travels to other processes. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from titan_core.config.redaction import text_without_secrets
from titan_core.data.reading import ReadPolicy
from titan_core.data.source import DatasetRequest, DocumentSource, OnEnd
from titan_core.errors import Problem, UserError
from titan_core.job.batch_plan import BatchPlan
from titan_core.ref import Ref
from titan_core.tokenizers.fingerprint import fingerprint

if TYPE_CHECKING:
    from titan_core.tokenizers.tokenizer import TextTokenizer


@dataclass(frozen=True)
class DatasetSpec:
    """One dataset of a mixture."""

    name: str
    """What it is called in metrics."""
    weight: float
    open: Ref[Callable[[DatasetRequest], DocumentSource]]
    request: DatasetRequest


@dataclass(frozen=True)
class StreamSpec:
    """Datasets, how they are mixed and tokenised, and how the global batch is divided into logical shards."""

    datasets: tuple[DatasetSpec, ...]
    tokenizer: Ref[Callable[[str | None], TextTokenizer]]
    tokenizer_path: str | None
    plan: BatchPlan
    seed: int
    on_end: OnEnd
    policy: ReadPolicy = field(default_factory=ReadPolicy)
    shuffle_buffer: int = 0
    """Documents among which a streamed dataset is shuffled."""

    def identity(self, sources: Sequence[DocumentSource], tokenizer: TextTokenizer) -> dict[str, Any]:
        """What a position in this stream means something in alone."""
        return {
            "datasets": [
                [
                    one.request.name,
                    one.request.path and text_without_secrets(one.request.path),
                    one.weight,
                    one.request.format or one.request.text_field,
                    *([one.request.split] if one.request.split is not None else []),
                ]
                for one in self.datasets
            ],
            "number of documents": [source.num_documents for source in sources],
            "tokenizer": fingerprint(tokenizer),
            "training.seed": self.seed,
            "data.logical_shards": self.plan.logical_shards,
            "data.shuffle_buffer": self.shuffle_buffer,
        }

    def open_sources(self) -> list[DocumentSource]:
        """Every dataset, opened.

        Raises:
            UserError: one that cannot be, or that has no document for each logical shard.
        """
        sources = [one.open.load()(one.request) for one in self.datasets]
        shards = self.plan.logical_shards
        problems = [
            Problem(
                f"dataset {one.name!r}",
                f"it has {source.num_documents} documents, fewer than the {shards} streams that they are divided into",
                "lower data.logical_shards (or training.global_batch_size), or give more documents",
            )
            for one, source in zip(self.datasets, sources, strict=True)
            if source.num_documents is not None and source.num_documents < shards and one.weight and self.on_end != "once"
        ]
        if problems:
            raise UserError(*problems)
        return sources
