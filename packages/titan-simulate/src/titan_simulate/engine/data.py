"""Documents of random tokens, so that a job can be simulated where its data, tokenizer and weights are not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy
from numpy.typing import NDArray

from titan_core.api import DatasetContext, DocumentSource, Ref, StoredModel, TextTokenizer
from titan_core.api.config.sections import ModelSection
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.reading import State, StreamSpec

SETTINGS = {"job.device": "cuda", "data.num_workers": "0"}
"""Settings of every simulated job. Its run directory should be a temporary one."""

DOCUMENTS = 16
"""Number of different documents; then they repeat."""
TOKENS = (300, 3_000)
"""Shortest and longest document."""

DIFFERENT = 16
"""Number of different tokens: every vocabulary has them."""


class SimulatedTokenizer(TextTokenizer):
    """Has the vocabulary of the job's tokenizer."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    @property
    def vocab_size(self) -> int:
        """Largest id plus one."""
        return self._vocab_size

    def encode_document(self, text: str) -> list[int]:
        """Return a token per character, all the same."""
        return [0] * len(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return an empty text."""
        return ""


class _Shard:
    def __init__(self, documents: Sequence[NDArray[Any]]) -> None:
        self._documents, self._next = documents, 0

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return self

    def __next__(self) -> NDArray[Any]:
        self._next += 1
        return self._documents[self._next % len(self._documents)]

    def state_dict(self) -> State:
        return {"next": self._next}

    def load_state_dict(self, state: State) -> None:
        self._next = int(state["next"])


class SimulatedDocuments:
    """An endless source of documents of random lengths, with random tokens: where a rank is real, routers choose experts."""

    num_documents: int | None = None

    def __init__(self) -> None:
        random = numpy.random.default_rng(0)
        sizes = random.integers(*TOKENS, size=DOCUMENTS)
        self._documents = [random.integers(DIFFERENT, size=size, dtype=numpy.uint32) for size in sizes]

    def shard(self, index: int, count: int, epoch: int) -> _Shard:
        """Return a shard; all are the same."""
        return _Shard(self._documents)


def open_documents(context: DatasetContext[Any]) -> DocumentSource:
    """Open the source."""
    return SimulatedDocuments()


def load_nothing(context: object) -> None:
    """Load no weights: simulated ones have no values."""


def with_simulated_weights(job: AssembledJob) -> AssembledJob:
    """Return ``job`` without the weights that it, or its reference model, starts from, which may be on another machine."""
    if job.reference is not None:
        job = replace(job, reference=with_simulated_weights(job.reference))
    path = job.config.section(ModelSection).from_pretrained
    if path is None:
        return job
    weights = job.config.pretrained or StoredModel(path, {}, Ref("titan_simulate.engine.data:load_nothing"))
    weights = replace(weights, load=Ref("titan_simulate.engine.data:load_nothing"))
    return replace(job, config=replace(job.config, pretrained=weights))


def with_simulated_data(job: AssembledJob) -> AssembledJob:
    """Return ``job`` with random documents in place of its datasets."""

    def simulated(spec: StreamSpec) -> StreamSpec:
        build = Ref[Any]("titan_simulate.engine.data:open_documents")
        return replace(spec, datasets=tuple(replace(dataset, build=build) for dataset in spec.datasets), on_end="repeat")

    return replace(
        job,
        data=simulated(job.data),
        validation=None if job.validation is None else simulated(job.validation),
        text_tokenizer=SimulatedTokenizer(job.text_tokenizer.vocab_size),
        missing=(),
    )
